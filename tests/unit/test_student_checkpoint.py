"""A student's checkpoint: what is written comes back, and whatever is not exactly that is refused in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.drafters.student import (
    RESERVED,
    Student,
    StudentHeader,
    Target,
    check_name,
    load_student,
    save_student,
    student_drafter,
)
from backend.interface import BackendError
from backend.models.fingerprint import combine, hash_ids, hash_tensor
from backend.models.student import StudentBlock, StudentConfig
from tests import factory

SHAPE = factory.Shape()
MODEL = factory.build(SHAPE)
TARGET = Target(weights="a" * 64, tokenizer="b" * 64, chat_template="c" * 64)
IDS = torch.arange(0, 320, 8)


def random_block(preset: str = "sv", seed: int = 0, **changed: Any) -> StudentBlock:
    config = StudentConfig.preset(preset, MODEL.config, len(IDS)).model_copy(update=changed)
    block = StudentBlock(config, MODEL.config, IDS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return block


def saved(directory: Path, block: StudentBlock | None = None, **fields: Any) -> Path:
    block = block or random_block()
    save_student(directory, block, StudentHeader.of(block, TARGET, **fields))
    return directory


def load(directory: Path, weights: str = TARGET.weights, tokenizer: str = TARGET.tokenizer) -> Student:
    return load_student(directory, MODEL, weights, tokenizer)


def refused(directory: Path, **given: str) -> str:
    with pytest.raises(BackendError) as caught:
        load(directory, **given)
    text = str(caught.value)
    assert "\n" not in text
    return text


# What comes back


@pytest.mark.parametrize("preset", ["sv", "sv-slim"])
def test_a_saved_student_comes_back_as_it_was(tmp_path: Path, preset: str) -> None:
    block = random_block(preset, carrier="pre_norm")
    training, evaluation = {"steps": 3, "seed": 1}, {"tau": 2.5, "surv": [0.7, 0.5]}
    student = load(saved(tmp_path / "first", block, name="mine", training=training, evaluation=evaluation))
    assert (student.name, student.header.training, student.header.evaluation) == ("mine", training, evaluation)
    assert student.block.config == block.config
    assert student.header.target == TARGET
    theirs, ours = block.state_dict(), student.block.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert not any(parameter.requires_grad for parameter in student.block.parameters())


def test_a_student_without_a_name_has_its_directorys(tmp_path: Path) -> None:
    assert load(saved(tmp_path / "step-400")).name == "step-400"


def test_the_ids_and_the_embeddings_are_where_they_belong(tmp_path: Path) -> None:
    tensors = load_file(saved(tmp_path / "a") / "model.safetensors")
    assert torch.equal(tensors["d2t"], IDS.to(torch.int32))
    assert not any("embed_tokens" in name for name in tensors)
    header = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (header["model_type"], header["format_version"], header["d2t_kind"]) == ("studentsv", 1, "absolute")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
def test_weights_are_loaded_in_the_models_dtype(tmp_path: Path, stored: torch.dtype, served: torch.dtype) -> None:
    block = random_block().to(stored)
    directory = saved(tmp_path / "a", block)
    assert load_file(directory / "model.safetensors")["fc.weight"].dtype == stored
    student = load_student(directory, factory.build(SHAPE).to(served), TARGET.weights, TARGET.tokenizer)
    for name, parameter in student.block.named_parameters():
        assert torch.equal(parameter, block.get_parameter(name).to(served))
    assert student.block.d2t.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_over_a_file_does_not_reach_who_has_loaded_it(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = saved(tmp_path / "a", random_block().to(dtype))
    student = load_student(directory, factory.build(SHAPE).to(dtype), TARGET.weights, TARGET.tokenizer)
    before = {name: tensor.clone() for name, tensor in student.block.state_dict().items()}
    with (directory / "model.safetensors").open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        file.write(bytes(size))
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.block.state_dict().items())


def test_the_same_student_is_the_same_bytes_and_has_one_fingerprint(tmp_path: Path) -> None:
    one, other = saved(tmp_path / "one", name="x"), saved(tmp_path / "other", name="x")
    for file in ("model.safetensors", "config.json"):
        assert (one / file).read_bytes() == (other / file).read_bytes()
    renamed = load(saved(tmp_path / "renamed", name="y"))
    assert load(one).fingerprint == renamed.fingerprint


def test_other_weights_ids_or_conventions_are_another_fingerprint(tmp_path: Path) -> None:
    shifted = random_block()
    shifted.d2t += 1
    blocks = [random_block(), random_block(seed=1), random_block(carrier="pre_norm"), shifted]
    found = {load(saved(tmp_path / str(i), block)).fingerprint for i, block in enumerate(blocks)}
    assert len(found) == len(blocks)


def test_saving_over_a_student_leaves_the_new_one_and_nothing_else(tmp_path: Path) -> None:
    saved(tmp_path / "best", random_block(seed=0))
    saved(tmp_path / "best", random_block(seed=1))
    assert torch.equal(load(tmp_path / "best").block.fc.weight, random_block(seed=1).fc.weight)
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["config.json", "model.safetensors"]


def test_a_writer_that_ends_between_the_files_leaves_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "best", random_block(seed=0))

    def end(self: Path, *args: Any, **kwargs: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", end)
    for directory in (tmp_path / "best", tmp_path / "new"):
        with pytest.raises(BackendError, match=r"cannot write the student .* No space left on device"):
            saved(directory, random_block(seed=1))
    assert "the weights" in refused(tmp_path / "best")
    assert "there is no config.json" in refused(tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]


def test_a_header_of_another_block_is_not_written(tmp_path: Path) -> None:
    header = StudentHeader.of(random_block(seed=1), TARGET)
    with pytest.raises(ValueError, match="another block: weights_sha256"):
        save_student(tmp_path / "a", random_block(seed=0), header)
    assert not (tmp_path / "a").exists()


def test_a_block_made_ready_to_decode_with_is_not_saved(tmp_path: Path) -> None:
    student = load_student(
        saved(tmp_path / "a"), factory.build(SHAPE).to(torch.bfloat16), TARGET.weights, TARGET.tokenizer
    )
    drafter = student_drafter(factory.build(SHAPE).to(torch.bfloat16), student)
    assert (drafter.name, drafter.fingerprint, drafter.block) == ("a", student.fingerprint, student.fingerprint)
    with pytest.raises(ValueError, match="let its weights go"):
        StudentHeader.of(student.block, TARGET)


# What is refused


def change_header(directory: Path, **changed: Any) -> Path:
    header = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**header, **changed}))
    return directory


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], None], *, rehash: bool) -> Path:
    """`rehash`: the header is made to name the changed tensors, as a writer with a fault would."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    if rehash:
        weights = combine({name: hash_tensor(tensor) for name, tensor in tensors.items() if name != "d2t"})
        change_header(directory, weights_sha256=weights, d2t_sha256=hash_ids(tensors["d2t"]))
    return directory


def with_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"][3] = torch.nan


def with_infinity(tensors: dict[str, torch.Tensor]) -> None:
    tensors["head.weight"][5, 7] = -torch.inf


def without_carrier(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["out_up.weight"]


def with_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["embed_tokens.weight"] = torch.zeros(3)


def narrower(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()


def quantised(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)


def half(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].half()


def other_bits(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"][0, 0] += 1


def permuted(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"].flip(0).contiguous()


def wide_ids(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"].long()


def fewer_ids(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"][:-1].contiguous()


def negative(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][0] = -1


def past_the_end(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][-1] = 320


def no_ids(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["d2t"]


@pytest.mark.parametrize(
    ("change", "rehash", "said"),
    [
        (with_nan, True, "'norm.weight' .* not finite"),
        (with_infinity, True, "'head.weight' .* not finite"),
        (without_carrier, True, "has no tensor 'out_up.weight'"),
        (with_more, True, "a tensor 'embed_tokens.weight'"),
        (narrower, True, r"'fc.weight' .* float32 \[32, 127\], not bfloat16 or float32 \[32, 128\]"),
        (quantised, True, "'fc.weight' .* int8"),
        (half, True, "'fc.weight' .* float16"),
        (other_bits, False, "the weights .* are not those"),
        (permuted, False, "d2t .* is not the one that its config.json names"),
        (permuted, True, "not strictly ascending"),
        (wide_ids, True, r"d2t .* int64 \[40\], not int32 \[40\]"),
        (fewer_ids, True, r"d2t .* int32 \[39\], not int32 \[40\]"),
        (negative, True, "lists id -1, the model has 0 to 319"),
        (past_the_end, True, "lists id 320, the model has 0 to 319"),
        (no_ids, False, "no tensor 'd2t'"),
    ],
)
def test_tensors_that_are_not_as_they_should_be_are_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], rehash: bool, said: str
) -> None:
    directory = change_tensors(saved(tmp_path / "a"), change, rehash=rehash)
    with pytest.raises(BackendError, match=said):
        load(directory)


def test_weights_that_the_models_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    def large(tensors: dict[str, torch.Tensor]) -> None:
        tensors["fc.weight"][0, 0] = torch.finfo(torch.float32).max  # which bfloat16 rounds to infinity

    directory = change_tensors(saved(tmp_path / "a", random_block().float()), large, rehash=True)
    load_student(directory, factory.build(SHAPE).float(), TARGET.weights, TARGET.tokenizer)
    with pytest.raises(BackendError, match=r"'fc.weight' .* not finite"):
        load_student(directory, factory.build(SHAPE).to(torch.bfloat16), TARGET.weights, TARGET.tokenizer)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"format_version": 2}, "has format 2; this build reads 1"),
        ({"model_type": "qwen3_5"}, "no student: its model_type is 'qwen3_5'"),
        ({"weights_sha256": "short"}, "weights_sha256"),
        ({"d2t_kind": "offset"}, "d2t_kind"),
        ({"more": 1}, "more"),
        ({"architecture": {"d_inner": 8}}, "architecture"),
        ({"name": "../up"}, "cannot be a drafter's name"),
        ({"name": "mtp"}, "cannot be named 'mtp'"),
    ],
)
def test_headers_that_are_not_as_they_should_be_are_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    assert said in refused(change_header(saved(tmp_path / "a"), **changed))


@pytest.mark.parametrize("field", ["hidden_size", "rope_theta", "rms_norm_eps", "rotary_dim"])
def test_what_the_trunk_decides_must_be_the_trunks(tmp_path: Path, field: str) -> None:
    saved(tmp_path / "a")
    architecture = json.loads((tmp_path / "a" / "config.json").read_text())["architecture"]
    architecture[field] = {"hidden_size": 128, "rope_theta": 1e4, "rms_norm_eps": 1e-5, "rotary_dim": 4}[field]
    assert f"does not fit this model: {field}" in refused(change_header(tmp_path / "a", architecture=architecture))


def test_an_architecture_that_is_not_the_tensors_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    architecture = json.loads((tmp_path / "a" / "config.json").read_text())["architecture"]
    assert "has no tensor 'inner_norm.weight'" in refused(
        change_header(tmp_path / "a", architecture={**architecture, "head": "inner"})
    )


@pytest.mark.parametrize("width", ["intermediate_size", "num_attention_heads", "head_dim"])
@pytest.mark.parametrize("size", [2**20, 2**60, 2**62, 2**70])
def test_widths_that_no_tensor_has_are_refused_however_large(tmp_path: Path, width: str, size: int) -> None:
    saved(tmp_path / "a")
    architecture = json.loads((tmp_path / "a" / "config.json").read_text())["architecture"]
    said = refused(change_header(tmp_path / "a", architecture={**architecture, width: size}))
    assert "not bfloat16 or float32 [" in said or "too large for any machine" in said


def test_a_student_of_another_model_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    assert "another model: its weights are aaaaaaaaaaaa, here dddddddddddd" in refused(tmp_path / "a", weights="d" * 64)
    assert "another model: its tokenizer" in refused(tmp_path / "a", tokenizer="d" * 64)


def test_files_that_are_missing_or_cut_off_are_refused(tmp_path: Path) -> None:
    assert "there is no config.json" in refused(tmp_path / "nothing")
    directory = saved(tmp_path / "a")
    weights = directory / "model.safetensors"
    content = weights.read_bytes()
    for length in (0, 100, len(content) - 1):
        weights.write_bytes(content[:length])
        assert "cannot read" in refused(directory)
    weights.unlink()
    assert "is missing" in refused(directory)
    (directory / "config.json").write_text("{")
    assert "not a student's" in refused(directory)


@pytest.mark.parametrize(
    ("name", "said"), [("config.json", "there is no config.json"), ("model.safetensors", "is missing")]
)
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str, said: str) -> None:
    path = saved(tmp_path / "a") / name
    path.unlink()
    os.mkfifo(path)
    assert said in refused(tmp_path / "a")


def test_names_of_other_drafters_are_taken() -> None:
    assert check_name("student-2026.1") == "student-2026.1"
    assert {"mtp", "none", "hot_vocab", "prediction", "grammar", "active"} == set(RESERVED)
    for name in (*RESERVED, "", "a b", "-x", "x" * 65, "a/b", "a\n"):
        with pytest.raises(BackendError):
            check_name(name)


def test_another_trunks_student_does_not_load_even_under_the_right_hashes(tmp_path: Path) -> None:
    directory = saved(tmp_path / "a")
    wider = factory.build(replace(SHAPE, hidden=128))
    with pytest.raises(BackendError, match="hidden_size 64, here 128"):
        load_student(directory, wider, TARGET.weights, TARGET.tokenizer)
