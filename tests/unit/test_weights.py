"""Checkpoints into models: every layout of the real ones, every way to be wrong in one line, one fingerprint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import backend.models.weights as weights_module
from backend.interface import BackendError
from backend.loading import LocalOptions
from backend.local import LocalBackend
from backend.models.hub import resolve_model
from backend.models.qwen3_5 import Qwen35
from backend.models.weights import LoadedModel, load_model
from tests import factory
from tests.factory import Shape

ROOT = Path(__file__).parents[2]
SHAPE = Shape(vocab=64, hidden=32, intermediate=48, layers=("linear", "full"), heads=2, kv_heads=1, head_dim=16)
NORM = "model.layers.0.input_layernorm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "draftloop" / "tensor-hashes.json"


def load(directory: Path, *, mtp: bool = True, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(directory, torch.device("cpu"), dtype, with_mtp=mtp)


def save(out: Path, shape: Shape = SHAPE, **layout: Any) -> Path:
    return factory.save(factory.build(shape), shape, out, **layout)


def change(directory: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Rewrite the one safetensors file of a checkpoint."""
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def configure(directory: Path, **fields: Any) -> Path:
    """Replace fields of config.json; None removes one."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return directory


def refusal(directory: Path, **how: Any) -> str:
    """The error of a checkpoint that must not load: always one line."""
    with pytest.raises(BackendError) as caught:
        load(directory, **how)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def same(loaded: Qwen35, original: Qwen35, dtype: torch.dtype) -> bool:
    ours, theirs = dict(loaded.named_parameters()), dict(original.named_parameters())
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name].to(dtype), theirs[name].to(dtype)) for name in theirs)


# -- what loads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("multimodal", [False, True], ids=["text", "multimodal"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_layout_loads_to_the_same_weights(tmp_path: Path, shards: int, multimodal: bool, tied: bool) -> None:
    shape = replace(SHAPE, tied=tied)
    model = factory.build(shape)
    loaded = load(factory.save(model, shape, tmp_path / "m", shards=shards, multimodal=multimodal))
    assert same(loaded.model, model, torch.float32)
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == tied
    assert all(p.device.type == "cpu" and not p.requires_grad for p in loaded.model.parameters())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["stored-fp32", "stored-bf16"])
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_arrive_in_the_precision_asked_for(tmp_path: Path, stored: torch.dtype, asked: torch.dtype) -> None:
    model = factory.build(SHAPE)
    loaded = load(factory.save(model, SHAPE, tmp_path / "m", dtype=stored), dtype=asked)
    rounded = torch.bfloat16 if torch.bfloat16 in (stored, asked) else torch.float32
    assert same(loaded.model, model.to(stored), rounded)
    kept = {name for name, p in loaded.model.named_parameters() if p.dtype == torch.float32}
    if asked == torch.bfloat16:
        assert kept == {f"model.layers.0.linear_attn.{name}" for name in ("A_log", "dt_bias", "norm.weight")}
    else:
        assert kept == {name for name, _ in loaded.model.named_parameters()}


def test_a_tied_checkpoint_may_repeat_its_head(tmp_path: Path) -> None:
    directory = save(tmp_path / "m")
    change(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    loaded = load(directory)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight


def test_a_tied_checkpoint_whose_head_differs_is_refused(tmp_path: Path) -> None:
    directory = save(tmp_path / "m")
    change(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    assert "'lm_head.weight'" in refusal(directory)


def test_the_mtp_block_stays_out_where_no_drafter_wants_it(tmp_path: Path) -> None:
    loaded = load(save(tmp_path / "m"), mtp=False)
    assert loaded.model.mtp is None
    assert loaded.drafter == "none"


def test_without_mtp_tensors_only_the_mtp_drafter_is_refused(tmp_path: Path) -> None:
    directory = save(tmp_path / "m", replace(SHAPE, mtp=False))
    assert "--drafter none" in refusal(directory)
    assert load(directory, mtp=False).model.mtp is None


# -- what does not -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [NORM, QUERY, "model.embed_tokens.weight", "mtp.fc.weight", "mtp.norm.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    assert repr(name) in refusal(change(save(tmp_path / "m"), lambda t: t.pop(name)))


def test_a_missing_head_of_an_untied_checkpoint_is_named(tmp_path: Path) -> None:
    directory = save(tmp_path / "m", replace(SHAPE, tied=False))
    assert "'lm_head.weight'" in refusal(change(directory, lambda t: t.pop("lm_head.weight")))


@pytest.mark.parametrize("name", [NORM, QUERY, "mtp.fc.weight"])
def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path, name: str) -> None:
    directory = save(tmp_path / "m")
    wanted = list(load_file(directory / "model.safetensors")[name].shape)
    message = refusal(change(directory, lambda t: t.update({name: torch.zeros(7, 5)})))
    assert all(part in message for part in (repr(name), "[7, 5]", str(wanted)))


def test_a_misshapen_repeated_head_is_named(tmp_path: Path) -> None:
    directory = change(save(tmp_path / "m"), lambda t: t.update({"lm_head.weight": torch.zeros(7, 5)}))
    assert "'lm_head.weight'" in refusal(directory)


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "mtp.layers.1.mlp.up_proj.weight", "x"])
def test_an_unexpected_tensor_is_named(tmp_path: Path, name: str) -> None:
    assert repr(name) in refusal(change(save(tmp_path / "m"), lambda t: t.update({name: torch.zeros(2)})))


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    directory = save(tmp_path / "m")
    change(directory, lambda t: t.update({NORM.replace("model.", "model.language_model."): t[NORM].clone()}))
    message = refusal(directory)
    assert repr(NORM) in message
    assert "twice" in message


def quantised(tensors: dict[str, Tensor], scale: bool) -> None:
    tensors[QUERY] = tensors[QUERY].to(torch.float8_e4m3fn)
    if scale:
        tensors[f"{QUERY}_scale_inv"] = torch.ones(1, 1)


@pytest.mark.parametrize("scale", [False, True])
def test_quantised_tensors_are_named_as_such(tmp_path: Path, scale: bool) -> None:
    message = refusal(change(save(tmp_path / "m"), lambda t: quantised(t, scale)))
    assert QUERY in message
    assert "quantised" in message


def test_an_announced_quantisation_is_refused(tmp_path: Path) -> None:
    directory = change(save(tmp_path / "m"), lambda t: quantised(t, True))
    assert "quantization_config" in refusal(configure(directory, quantization_config={"quant_method": "fp8"}))


@pytest.mark.parametrize("kept", [0, 4, 200, -1], ids=["empty", "no-header", "half-header", "one-byte-short"])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    file = save(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert str(file) in refusal(file.parent)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    directory = save(tmp_path / "m")
    (directory / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(directory)
    assert "config.json" in refusal(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = save(tmp_path / "m", shards=3)
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(directory)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "5", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": ["b"]}}', "\xff"],
)
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    index = save(tmp_path / "m", shards=2) / "model.safetensors.index.json"
    index.write_text(text, encoding="latin-1")
    assert str(index) in refusal(index.parent)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff"])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    config = save(tmp_path / "m") / "config.json"
    config.write_text(text, encoding="latin-1")
    assert str(config) in refusal(config.parent)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "qwen3_5_moe_text"}, "qwen3_5_moe_text"),
        ({"model_type": "llama"}, "llama"),
        ({"model_type": None}, "model_type"),
        ({"text_config": "none"}, "model_type"),
        ({"rope_parameters": None}, "rope_parameters"),
        ({"rope_parameters": {}}, "rope_theta"),
        ({"rope_parameters": "default"}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "big"}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": "x"}}, "partial_rotary_factor"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "heads"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"eos_token_id": "end"}, "eos_token_id"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_cannot_be_served_is_explained(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    assert named in refusal(configure(save(tmp_path / "m"), **fields))


# -- fingerprints --------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_one_for_all_layouts(tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [{}, {"shards": 4}, {"multimodal": True}, {"multimodal": True, "shards": 3}]
    found = {(m.weights, m.drafter) for i, how in enumerate(layouts) for m in [load(save(tmp_path / str(i), **how))]}
    assert len(found) == 1


def test_the_fingerprint_of_the_trunk_does_not_depend_on_the_mtp_block(tmp_path: Path) -> None:
    directory = save(tmp_path / "m")
    before = load(directory)
    assert load(directory, mtp=False).weights == before.weights
    change(directory, lambda t: t["mtp.fc.weight"].add_(1))
    after = load(directory)
    assert after.weights == before.weights
    assert after.drafter != before.drafter


def test_the_fingerprint_is_of_the_file_and_not_of_the_loaded_precision(tmp_path: Path) -> None:
    directory = save(tmp_path / "m")
    assert load(directory).weights == load(directory, dtype=torch.bfloat16).weights


def test_one_bit_of_one_tensor_changes_the_fingerprint(tmp_path: Path) -> None:
    directory = save(tmp_path / "m")
    before = load(directory)

    def flip(tensors: dict[str, Tensor]) -> None:
        tensors[QUERY].view(torch.uint8)[-1, -4] ^= 1

    after = load(change(directory, flip))
    assert after.weights != before.weights
    assert after.drafter == before.drafter


def test_name_type_and_shape_are_part_of_the_fingerprint() -> None:
    zeros = torch.zeros(4, 2)
    variants = {
        "same": {"a": zeros},
        "name": {"b": zeros},
        "shape": {"a": zeros.reshape(2, 4)},
        "dtype": {"a": torch.zeros(4, 2, dtype=torch.int32)},
        "more": {"a": zeros, "b": zeros},
    }
    prints = {
        label: weights_module.combine({name: weights_module.hash_tensor(t) for name, t in tensors.items()})
        for label, tensors in variants.items()
    }
    assert len(set(prints.values())) == len(variants)


def test_a_strided_tensor_hashes_like_its_values() -> None:
    values = torch.arange(6.0).reshape(2, 3)
    assert weights_module.hash_tensor(values.T) == weights_module.hash_tensor(values.T.contiguous())


# -- the cache of hashes -------------------------------------------------------------------------------------------


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each tensor whose bytes were read and hashed."""
    calls: list[int] = []
    plain = weights_module.hash_tensor

    def counted(tensor: Tensor) -> str:
        calls.append(1)
        return plain(tensor)

    monkeypatch.setattr(weights_module, "hash_tensor", counted)
    return calls


def test_an_unchanged_file_is_hashed_once(tmp_path: Path, hashed: list[int]) -> None:
    directory = save(tmp_path / "m", shards=2)
    first = load(directory)
    assert len(hashed) == len(dict(first.model.named_parameters()))
    hashed.clear()
    assert load(directory).weights == first.weights
    assert load(directory, mtp=False).weights == first.weights
    assert hashed == []


def test_a_rewritten_file_of_the_same_size_is_hashed_anew(tmp_path: Path) -> None:
    directory = save(tmp_path / "m")
    before, size = load(directory), (directory / "model.safetensors").stat().st_size
    change(directory, lambda t: t[NORM].add_(1))
    stat = (directory / "model.safetensors").stat()
    assert stat.st_size == size
    os.utime(directory / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert load(directory).weights != before.weights


def test_a_file_replaced_while_it_is_read_leaves_no_stale_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save(tmp_path / "m")
    other = change(save(tmp_path / "other"), lambda t: t[NORM].add_(1)) / "model.safetensors"
    with monkeypatch.context() as patch:
        read = weights_module._tensors

        def then_replaced(file: Path) -> Any:
            yield from read(file)
            os.utime(other, ns=(1, 1))
            other.replace(file)

        patch.setattr(weights_module, "_tensors", then_replaced)
        before = load(directory)
    assert load(directory).weights != before.weights


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": []}', '{"a": {"b": 5}}', "\xff"])
def test_a_cache_that_cannot_be_read_is_only_slower(
    tmp_path: Path, cache_home: Path, hashed: list[int], text: str
) -> None:
    directory = save(tmp_path / "m")
    before = load(directory)
    key, entries = next(iter(json.loads(cache_home.read_text()).items()))
    broken = text.replace('"a"', json.dumps(key)).replace('"b"', json.dumps(next(iter(entries))))
    cache_home.write_text(broken, encoding="latin-1")
    hashed.clear()
    assert load(directory).weights == before.weights
    assert hashed


def test_a_cache_that_cannot_be_written_is_only_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    directory = save(tmp_path / "m")
    before = load(directory)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load(directory).weights == before.weights


# -- memory --------------------------------------------------------------------------------------------------------

PEAK = """
import sys, torch
from pathlib import Path
from backend.models.weights import load_model

def status(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

load_model(Path(sys.argv[1]), torch.device("cpu"), torch.bfloat16, with_mtp=True)  # warms what loading imports
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
before = status("VmRSS:")
loaded = load_model(Path(sys.argv[2]), torch.device("cpu"), torch.bfloat16, with_mtp=True)
assert all(float(p.sum()) is not None for p in loaded.model.parameters())  # every page is really there
print(status("VmHWM:") - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux' peak memory counter")
def test_loading_keeps_no_second_copy(tmp_path: Path) -> None:
    shape = replace(SHAPE, vocab=200_000, hidden=256, tied=False)
    big = save(tmp_path / "big", shape, dtype=torch.bfloat16)
    size = (big / "model.safetensors").stat().st_size
    assert size > 200e6
    peak = int(python(PEAK, str(save(tmp_path / "small")), str(big)).stdout)
    assert 0.9 * size < peak < 1.3 * size


# -- names and hub ids ---------------------------------------------------------------------------------------------


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=kept | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )


RESOLVE = """
import sys
from backend.interface import BackendError
from backend.models.hub import resolve_model
try:
    print(resolve_model(sys.argv[1]))
except BackendError as error:
    print("error:", error)
"""


def resolved(name: str, home: Path, **environment: str) -> str:
    return python(RESOLVE, name, HF_HOME=str(home), **environment).stdout.rstrip("\n")


def test_an_uncached_hub_id_offline_is_one_clear_line(tmp_path: Path) -> None:
    answer = resolved("owner/name", tmp_path, HF_HUB_OFFLINE="1")
    assert answer.startswith("error: ")
    assert "'owner/name'" in answer
    assert "cache" in answer
    assert "\n" not in answer


def test_an_unreachable_hub_is_one_clear_line(tmp_path: Path) -> None:
    answer = resolved("owner/name", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert answer.startswith("error: ")
    assert "'owner/name'" in answer
    assert "\n" not in answer


def test_a_cached_hub_id_loads_offline(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot = save(repository / "snapshots" / "0123abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    answer = resolved("owner/name", tmp_path, HF_HUB_OFFLINE="1")
    assert answer == str(snapshot)
    assert load(Path(answer)).weights == load(snapshot).weights


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/dir", "./owner/name", "~/no-such", "a/b/c"])
def test_a_name_that_is_neither_a_directory_nor_a_hub_id_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BackendError, match="not a directory") as caught:
        resolve_model(name)
    assert repr(name) in str(caught.value)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = save(tmp_path / "m") / "model.safetensors"
    with pytest.raises(BackendError, match="not a directory"):
        resolve_model(str(file))


def test_a_malformed_hub_id_is_one_clear_line(tmp_path: Path) -> None:
    answer = resolved("owner/na..me", tmp_path, HF_HUB_OFFLINE="1")
    assert answer.startswith("error: ")
    assert "\n" not in answer


def test_the_backend_says_the_same_at_its_start(tmp_path: Path) -> None:
    import asyncio

    with pytest.raises(BackendError, match="no model at"):
        asyncio.run(LocalBackend(LocalOptions(model=str(tmp_path / "none"))).start())
