"""A checkpoint directory's tokenizer files: what is read from them, and one clear line where they are broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from backend.interface import BackendError, InvalidRequest
from backend.text.tokenizer import ChatTokenizer

TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
Edit = Any


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A byte-level BPE of 256 bytes, one merge and three added tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate([*letters, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)
    fast.save_pretrained(tmp_path)
    return tmp_path


def edit(path: Path, change: Edit) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_checkpoint_is_read_without_the_network(checkpoint: Path) -> None:
    tokenizer = ChatTokenizer.load(checkpoint)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "ab<|im_end|>"}], {})
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (260, {258, 259})
    assert [index for index in prompt.ids if index > 255] == [257, 256, 258]
    assert prompt.first_user_end == len(prompt.ids) - 1
    assert not prompt.in_reasoning


def test_the_template_may_stand_in_the_tokenizers_configuration(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").unlink()
    edit(checkpoint / "tokenizer_config.json", lambda config: config.update(chat_template=TEMPLATE))
    assert ChatTokenizer.load(checkpoint).template == TEMPLATE


@pytest.mark.parametrize(("listed", "expected"), [(7, {7, 258, 259}), ([7, 258], {7, 258, 259}), (None, {258, 259})])
def test_the_generation_config_adds_ends_of_text(checkpoint: Path, listed: Any, expected: set[int]) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert ChatTokenizer.load(checkpoint).eos_ids == expected


def test_ids_without_a_token_are_undecodable_wherever_they_are(checkpoint: Path) -> None:
    edit(checkpoint / "tokenizer.json", lambda spec: spec["added_tokens"][2].update(id=263))
    tokenizer = ChatTokenizer.load(checkpoint)
    gaps = tuple(index for index in range(270) if not tokenizer.token_bytes(index))
    assert tokenizer.undecodable_ids(270) == gaps
    assert gaps


def test_a_template_without_qwens_turns_has_no_known_first_user_turn(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert ChatTokenizer.load(checkpoint).encode_chat([{"role": "user", "content": "ab"}], {}).first_user_end == 0


def test_the_vocabularys_fingerprint_is_of_its_content(checkpoint: Path) -> None:
    before = ChatTokenizer.load(checkpoint)
    path = checkpoint / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1, sort_keys=True))
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE + " ")
    reformatted = ChatTokenizer.load(checkpoint)
    assert reformatted.fingerprint == before.fingerprint
    assert reformatted.template_fingerprint != before.template_fingerprint


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec["model"].update(merges=[["b", "a"]], vocab=_renamed(spec["model"]["vocab"], "ab", "ba")),
        lambda spec: spec.update(normalizer={"type": "NFC"}),
        lambda spec: spec["pre_tokenizer"].update(add_prefix_space=True),
        lambda spec: spec["added_tokens"][0].update(content="<|other|>"),
        lambda spec: spec["added_tokens"][0].update(special=False),
    ],
    ids=["vocabulary", "normalizer", "pre-tokenizer", "added token", "special or not"],
)
def test_another_tokenizer_has_another_fingerprint(checkpoint: Path, change: Edit) -> None:
    before = ChatTokenizer.load(checkpoint)
    edit(checkpoint / "tokenizer.json", change)
    after = ChatTokenizer.load(checkpoint)
    assert after.fingerprint != before.fingerprint
    assert after.template_fingerprint == before.template_fingerprint


def _renamed(vocab: dict[str, int], old: str, new: str) -> dict[str, int]:
    return {new if piece == old else piece: index for piece, index in vocab.items()}


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "cannot read the tokenizer in"),
        ("tokenizer.json", '{"model": {"type": "BPE"}}', "cannot read the tokenizer in"),
        ("tokenizer_config.json", "[", "cannot read the tokenizer in"),
        ("chat_template.jinja", None, "has no chat template"),
        ("chat_template.jinja", "one\n{% if %}", "the chat template in .* fails at line 2"),
        ("generation_config.json", "{", "generation_config.json is not a JSON object"),
        ("generation_config.json", "[1]", "generation_config.json is not a JSON object"),
        ("generation_config.json", '{"eos_token_id": "end"}', "eos_token_id must be a token id"),
    ],
)
def test_a_missing_or_broken_file_is_one_clear_line(
    checkpoint: Path, name: str, content: str | None, reason: str
) -> None:
    path = checkpoint / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(BackendError, match=reason) as refused:
        ChatTokenizer.load(checkpoint)
    assert "\n" not in str(refused.value)
    assert str(checkpoint) in str(refused.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda spec: spec["added_tokens"][0].update(lstrip=True), "strips or matches whole words"),
        (lambda spec: spec.update(pre_tokenizer={"type": "Whitespace"}), "not a byte-level BPE"),
    ],
)
def test_a_kind_of_tokenizer_we_cannot_be_exact_with_is_refused(checkpoint: Path, change: Edit, reason: str) -> None:
    edit(checkpoint / "tokenizer.json", change)
    with pytest.raises(BackendError, match=reason):
        ChatTokenizer.load(checkpoint)


def test_code_in_a_checkpoint_is_never_run(checkpoint: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (checkpoint / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    edit(
        checkpoint / "tokenizer_config.json",
        lambda config: config.update(tokenizer_class="Evil", auto_map={"AutoTokenizer": [None, "evil.Evil"]}),
    )
    with pytest.raises(BackendError) as refused:
        ChatTokenizer.load(checkpoint)
    assert "\n" not in str(refused.value)
    assert not ran.exists()


def test_a_template_that_fails_on_a_message_refuses_that_request(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text("{{ messages[0].content / 2 }}{{ missing.name }}")
    tokenizer = ChatTokenizer.load(checkpoint)
    with pytest.raises(InvalidRequest, match="the chat template cannot render these messages"):
        tokenizer.encode_chat([{"role": "user", "content": "ab"}], {})
