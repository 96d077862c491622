"""The model's own tokenizer and chat template: messages to token ids, token ids to bytes.

Only what the template writes can be a special token; nothing a client sends can. Knows no tensor and no HTTP.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.chat_template_utils import render_jinja_template

from backend.interface import BackendError, InvalidRequest
from backend.text.messages import for_template, split_reasoning
from backend.text.untrusted import Quarantine, literal_pattern, require_text

TURN_START, TURN_END, THINK, END_THINK = "<|im_start|>", "<|im_end|>", "<think>", "</think>"
_END_NAMES = (TURN_END, "<|endoftext|>")
_BYTE_OF = {char: byte for byte, char in bytes_to_unicode().items()}
# A client's template_kwargs may not reach the renderer's own arguments, its template first of all.
_RENDERER_ARGUMENTS = {*inspect.signature(render_jinja_template).parameters, "messages"}
_CLIENT_ARGUMENTS = {"tools", "documents", "add_generation_prompt"}
_RESERVED = _RENDERER_ARGUMENTS - _CLIENT_ARGUMENTS - {"kwargs"}


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation.

    `first_user_end`: tokens up to and including the end of the first user turn, `last_user_start`: those before the
    last one; 0 where the template's turns are not Qwen's. `in_reasoning`: the template left the assistant inside an
    open `<think>`.
    """

    ids: tuple[int, ...]
    text: str
    first_user_end: int
    in_reasoning: bool
    last_user_start: int = 0


class ChatTokenizer:
    """A byte-level BPE tokenizer with a chat template, as a checkpoint directory holds them.

    `vocab_size`: ids the tokenizer knows, added ones included. `added_ids`: those of literals such as `<think>`, which
    no text tokenizes to. `eos_ids`: ids that end an answer. `fingerprint`: sha256 over vocabulary, merges, added
    tokens, normalizer and pre-tokenizer; `template_fingerprint`: over the template's text.
    """

    def __init__(self, tokenizer: Any, extra_eos_ids: frozenset[int] = frozenset()) -> None:
        """`tokenizer`: a fast tokenizer of transformers. Raises BackendError for kinds that are not supported."""
        self.template: str = tokenizer.get_chat_template()
        self._template_constants = dict(tokenizer.special_tokens_map)
        render_jinja_template(conversations=[], chat_template=self.template)  # compiles: a syntax error shows here
        added = tokenizer.added_tokens_decoder
        for token in added.values():
            if token.lstrip or token.rstrip or token.single_word:
                raise BackendError(f"added token {token.content!r} strips or matches whole words: not supported")
        self._literal_ids: dict[str, int] = {token.content: index for index, token in added.items()}
        self._literals = literal_pattern(self._literal_ids)
        self._added_bytes = {index: literal.encode() for literal, index in self._literal_ids.items()}
        self.added_ids = frozenset(added)
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._pieces: dict[int, str] = {index: piece for piece, index in tokenizer.get_vocab().items()}
        self._splits_reasoning = END_THINK in self._literal_ids and "reasoning_content" in self.template
        spec = json.loads(tokenizer.backend_tokenizer.to_str())
        if spec["model"]["type"] != "BPE" or not _uses_byte_level(spec["pre_tokenizer"]):
            raise BackendError("the tokenizer is not a byte-level BPE")
        self._plain = _without_added_tokens(spec)
        self.vocab_size = max(self._pieces) + 1
        self.eos_ids = extra_eos_ids | {self._literal_ids[name] for name in _END_NAMES if name in self._literal_ids}
        self.fingerprint = _fingerprint(spec)
        self.template_fingerprint = hashlib.sha256(self.template.encode()).hexdigest()

    @classmethod
    def load(cls, directory: Path) -> ChatTokenizer:
        """Read tokenizer.json, its configuration, the chat template and generation_config.json's ends of text.

        Nothing is downloaded and no code of the checkpoint is run. Raises BackendError in one line.
        """
        if not (directory / "tokenizer.json").is_file():
            raise BackendError(f"{directory} has no tokenizer.json")
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the Rust tokenizer raises bare Exception for a malformed file
            raise BackendError(f"cannot read the tokenizer in {directory}: {_one_line(error)}") from error
        if not tokenizer.chat_template:
            raise BackendError(f"{directory} has no chat template (chat_template.jinja or tokenizer_config.json)")
        try:
            return cls(tokenizer, _generation_eos_ids(directory))
        except jinja2.TemplateSyntaxError as error:
            raise BackendError(f"the chat template in {directory} fails at line {error.lineno}: {error}") from error
        except (BackendError, ValueError) as error:
            raise BackendError(f"cannot use the tokenizer in {directory}: {_one_line(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The conversation as text, the client's literals and the template's not told apart."""
        rendered, quarantine = self._render(messages, template_kwargs, tools)
        return quarantine.reveal(rendered)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Prompt:
        """Render and tokenize. `template_kwargs` reach the template; `add_generation_prompt` is on unless given.

        `tools` stand before any of `template_kwargs`. Raises InvalidRequest with the template's own words where it
        refuses the conversation.
        """
        rendered, quarantine = self._render(messages, template_kwargs, tools)
        ids: list[int] = []
        first_user_end, last_user_start, in_user, literal = 0, 0, False, ""
        pieces = self._literals.split(rendered)  # text, literal, text, …, text
        for text, following in zip(pieces[::2], [*pieces[1::2], None], strict=True):
            if literal == TURN_START and text.startswith("user\n"):
                in_user, last_user_start = True, len(ids) - 1
            ids += self._ids(quarantine.reveal(text))
            if following is None:
                break
            literal = following
            ids.append(self._literal_ids[literal])
            if in_user and literal == TURN_END and not first_user_end:
                first_user_end = len(ids)
        thoughts = [literal for literal in pieces[1::2] if literal in (THINK, END_THINK)]
        in_reasoning = thoughts[-1:] == [THINK]
        return Prompt(tuple(ids), quarantine.reveal(rendered), first_user_end, in_reasoning, last_user_start)

    def encode_text(self, text: str) -> Prompt:
        """Tokenize a whole prompt as its author wrote it: literals such as `<|im_start|>` in it are meant."""
        require_text(text, "prompt")
        ids: list[int] = []
        pieces = self._literals.split(text)  # text, literal, text, …, text
        for plain, literal in zip(pieces[::2], [*pieces[1::2], None], strict=True):
            ids += self._ids(plain)
            if literal is not None:
                ids.append(self._literal_ids[literal])
        return Prompt(tuple(ids), text, first_user_end=0, in_reasoning=False)

    def described(self) -> dict[str, Any]:
        """Its special tokens by their roles, null where it has none of one, and the chat template."""
        roles = {"bos_token": None, "eos_token": None, "pad_token": None, "unk_token": None}
        return {**roles, **self._template_constants, "chat_template": self.template}

    def plain(self, text: str) -> list[int]:
        """Token ids of `text`, in which no literal is special."""
        require_text(text, "text")
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        # As a batch: `encode` would keep every other thread waiting, whole seconds for megabytes.
        ids: list[int] = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def literal_id(self, literal: str) -> int | None:
        """The id of an added token such as `</think>`, or None where the tokenizer has none of that name."""
        return self._literal_ids.get(literal)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of any id; empty for ids the tokenizer does not know (padding rows of the head)."""
        if token_id in self._added_bytes:
            return self._added_bytes[token_id]
        return bytes(_BYTE_OF[char] for char in self._pieces.get(token_id, ""))

    def text_bytes(self, token_id: int) -> bytes:
        """What an id adds to an answer's text: `token_bytes`, but nothing for special tokens such as `<|im_end|>`."""
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)

    def undecodable_ids(self, model_vocab: int) -> tuple[int, ...]:
        """Ids below the model's vocabulary size that stand for no token, to be masked before sampling."""
        if model_vocab < self.vocab_size:
            raise BackendError(f"the tokenizer has {self.vocab_size} ids, the model only {model_vocab}")
        return tuple(index for index in range(model_vocab) if index not in self._pieces)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[str, Quarantine]:
        """The rendered text, client literals hidden in it, and the quarantine that shows them again."""
        if reserved := sorted(_RESERVED & template_kwargs.keys()):
            raise InvalidRequest(f"chat_template_kwargs may not set {reserved[0]!r}", param="chat_template_kwargs")
        try:
            require_text(template_kwargs, "chat_template_kwargs")
            require_text(tools, "tools")
            turns = for_template(messages)
            require_text(turns, "messages")
            given = {**template_kwargs, **({"tools": tools} if tools else {})}
            quarantine = Quarantine(self._literal_ids, turns, given, self.template, self._template_constants)
            if self._splits_reasoning:
                turns = [split_reasoning(turn, quarantine.stand_in) for turn in turns]
            rendered, _ = render_jinja_template(
                conversations=[quarantine.hide(turns)],
                chat_template=self.template,
                **{"add_generation_prompt": True, **self._template_constants, **quarantine.hide(given)},
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(_one_line(error), param="messages") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # What a sandboxed template raises when a message has another shape than it expects.
            reason = f"the chat template cannot render these messages: {_one_line(error)}"
            raise InvalidRequest(reason, param="messages") from error
        return rendered[0], quarantine


def _generation_eos_ids(directory: Path) -> frozenset[int]:
    path = directory / "generation_config.json"
    if not path.is_file():
        return frozenset()
    try:
        ids = json.loads(path.read_text()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise BackendError(f"{path.name} is not a JSON object: {_one_line(error)}") from error
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(index, int) for index in listed):
        raise BackendError(f"{path.name}: eos_token_id must be a token id or a list of them, not {ids!r}")
    return frozenset(listed)


def _without_added_tokens(spec: dict[str, Any]) -> Tokenizer:
    """The same tokenizer in which no literal can match: its model alone knows no added token."""
    literals = {token["content"] for token in spec["added_tokens"]}
    vocab = {piece: index for piece, index in spec["model"]["vocab"].items() if piece not in literals}
    return Tokenizer.from_str(json.dumps({**spec, "added_tokens": [], "model": {**spec["model"], "vocab": vocab}}))


def _uses_byte_level(pre_tokenizer: dict[str, Any] | None) -> bool:
    parts = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    return any(part and part["type"] == "ByteLevel" for part in parts)


def _fingerprint(spec: dict[str, Any]) -> str:
    # Merges are written as pairs or as "a b", by the library's version.
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in spec["model"]["merges"]]
    what = {
        "vocab": spec["model"]["vocab"],
        "merges": merges,
        **{name: spec[name] for name in ("added_tokens", "normalizer", "pre_tokenizer")},
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
