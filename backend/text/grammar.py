"""Grammars an answer must match, compiled by llguidance against the model's vocabulary; an answer's way through one.

Text only: no client's grammar can ask for a special token or for the end. Knows no logits and no request.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from backend.interface import Grammar, InvalidRequest
from backend.text import tool_grammar
from backend.text.tokenizer import ChatTokenizer

BEGIN_CALL, END_CALL = "<tool_call>", "</tool_call>"
MAX_SOURCE = 65_536  # characters of a schema or expression
MAX_LARK_SOURCE = 8_192  # alternatives take quadratic time: two seconds here
CACHED_GRAMMARS = 64
# A model that likes white space would never come to the point.
_WHITESPACE = r"[ \t\r\n]{0,32}"
# What llguidance may spend: the first two when compiling (a few hundred ms), the others on one token (some 15 ms).
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    max_grammar_size=100_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)
_NO_TEXT = "NoExtension"  # begins llguidance's word for it
_LARK_LITERALS = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|#[^\n]*')
_NAMES = {
    "json_object": ("JSON object", "response_format"),
    "json_schema": ("JSON schema", "response_format"),
    "regex": ("regex", "structured_outputs"),
    "lark": ("Lark grammar", "structured_outputs"),
}


class GrammarCompiler:
    """Compiles grammars for one tokenizer. May be used from several threads."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ends = tokenizer.eos_ids
        self._text = np.ones(tokenizer.vocab_size, np.bool_)
        self._text[[token for token in tokenizer.added_ids | self._ends if token < len(self._text)]] = False
        self._tags = {tag: tokenizer.literal_id(tag) for tag in (BEGIN_CALL, END_CALL)}
        self._text_and_tags = self._text.copy()
        self._text_and_tags[[token for token in self._tags.values() if token is not None]] = True
        self._lock = threading.Lock()
        self._compiled = lru_cache(maxsize=CACHED_GRAMMARS)(self._compile)
        self._compiled_calls = lru_cache(maxsize=CACHED_GRAMMARS)(self._compile_calls)

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """At the start of an answer. Raises InvalidRequest in one line for what does not compile.

        The first call prepares the vocabulary, about a second for 248k tokens.
        """
        return GrammarMatcher(self._compiled(grammar), self._text, self._ends)

    def calls(self, tools: Sequence[Mapping[str, Any]], *, many: bool, begun: bool = False) -> GrammarMatcher:
        """Of an answer that calls one of the tools, or with `many` some, and says nothing else.

        `begun`: the token that begins the first call is there already. Raises InvalidRequest as `matcher` does.
        """
        try:
            compiled = self._compiled_calls(json.dumps(tools), many, begun)
        except RecursionError:
            raise _invalid_tools("they are nested too deeply") from None
        except ValueError as error:
            raise _invalid_tools(str(error)) from None
        return GrammarMatcher(compiled, self._text_and_tags, self._ends)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if not self._ends:
            raise _invalid(grammar, "the model has no end of text")
        most = MAX_LARK_SOURCE if grammar.kind == "lark" else MAX_SOURCE
        if len(grammar.source) > most:
            raise _invalid(grammar, f"it is longer than {most} characters")
        try:
            return self._built(_llguidance_source(grammar), self._text)
        except ValueError as error:
            raise _invalid(grammar, str(error)) from None

    def _compile_calls(self, tools: str, many: bool, begun: bool) -> LLMatcher:
        """Raises ValueError."""
        if not self._ends:
            raise ValueError("the model has no end of text")
        begin, end = (
            json.dumps(tag) if token is None else f"<[{token}]>"  # as llguidance spells text, and a token of its own
            for tag, token in self._tags.items()
        )
        exact, plain = (
            tool_grammar.source(json.loads(tools), begin, end, many=many, begun=begun, exact=exact)
            for exact in (True, False)
        )
        try:
            return self._built(LLMatcher.grammar_from_lark(exact), self._text_and_tags)
        except ValueError:
            if plain == exact:
                raise
            return self._built(LLMatcher.grammar_from_lark(plain), self._text_and_tags)

    def _built(self, source: str, text: NDArray[np.bool_]) -> LLMatcher:
        """Raises ValueError."""
        with self._lock:
            vocabulary = self._vocabulary
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=_LIMITS)
        fresh = GrammarMatcher(matcher, text, self._ends)
        reason = fresh.failure
        if not (reason or fresh.accepts or fresh.allowed().any()):
            reason = fresh.failure or _NO_TEXT
        if reason:
            raise ValueError("no text matches it" if reason.startswith(_NO_TEXT) else reason)
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer)), eos_token=sorted(self._ends))


class GrammarMatcher:
    """One answer's progress, a `backend.text.phases.Matcher`. The ends of text are the caller's to allow."""

    slack = 0

    def __init__(self, compiled: LLMatcher, text: NDArray[np.bool_], ends: frozenset[int]) -> None:
        self._compiled, self._text, self.ends = compiled, text, ends
        self._matcher = compiled.deep_copy()
        self._taken: list[bool] = []  # whether each token went into the grammar; an end does not
        self._over = False

    def fresh(self) -> GrammarMatcher:
        """Another, at the start."""
        return GrammarMatcher(self._compiled, self._text, self.ends)

    @property
    def accepts(self) -> bool:
        """The answer may end here."""
        return self._over or bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        """Nothing but an end may follow."""
        return self._over or bool(self._matcher.is_stopped())

    @property
    def failure(self) -> str | None:
        """Why the grammar cannot go on although it is not complete, in one line: it has become too complex."""
        return _one_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def allowed(self) -> NDArray[np.bool_]:
        """Which ids of text may come next: bool [vocabulary of the tokenizer]."""
        if self._over:
            return np.zeros_like(self._text)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=len(self._text), bitorder="little").view(np.bool_) & self._text

    def advance(self, token: int) -> bool:
        """Take one token; False, and no change, where the grammar does not allow it."""
        if self._over:
            return False
        if token in self.ends:
            if not self.accepts:
                return False
            self._over = True
        elif not self._is_text(token) or self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._taken.append(not self._over)
        return True

    def _is_text(self, token: int) -> bool:
        return 0 <= token < len(self._text) and bool(self._text[token])

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens taken."""
        if not count:
            return
        undone = self._taken[-count:]
        del self._taken[-count:]
        self._over = False  # an end is always the last
        self._matcher.rollback(sum(undone))

    def forced(self) -> list[int]:
        """Tokens that must come next."""
        return [] if self._over else list(self._matcher.compute_ff_tokens())


class _Vocabulary:
    """What llguidance asks of a tokenizer: every id's bytes, none for added tokens, so that no text gives them."""

    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.tokens = [
            b"" if token in tokenizer.added_ids else tokenizer.token_bytes(token)
            for token in range(tokenizer.vocab_size)
        ]
        for token in tokenizer.eos_ids & set(
            range(tokenizer.vocab_size)
        ):  # llguidance wants a name; 0xFF marks what is not text
            self.tokens[token] = b"\xff<end>"

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.plain(text if isinstance(text, str) else text.decode())


def _llguidance_source(grammar: Grammar) -> str:
    """Raises ValueError."""
    match grammar.kind:
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "lark":
            if "<" in _LARK_LITERALS.sub("", grammar.source):
                raise ValueError("special tokens cannot be part of a grammar")
            return LLMatcher.grammar_from_lark(grammar.source)
        case "json_object":
            schema: object = {"type": "object"}
        case "json_schema":
            try:
                schema = json.loads(grammar.source)
            except RecursionError:
                raise ValueError("it is nested too deeply") from None
            if not isinstance(schema, dict):
                raise ValueError("it is not an object")
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": _WHITESPACE})


def _invalid(grammar: Grammar, reason: str) -> InvalidRequest:
    name, field = _NAMES[grammar.kind]
    return InvalidRequest(f"the {name} cannot be used: {_one_line(reason)}", param=field)


def _invalid_tools(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the tools cannot be used: {_one_line(reason)}", param="tools")


def _one_line(reason: str) -> str:
    """Without llguidance's pictures of where in the source it was, and without its panics' backtraces."""
    told = re.split(r"\n<backtrace>|\n<state>|\n +\d+ \|", reason)[0]
    return re.sub(r"\s+", " ", told).strip()[:500]
