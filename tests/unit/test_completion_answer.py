"""Where a completion's tokens begin in its text: the same however it was told, and what each of them really says."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from backend.interface import ChatEvent, TokenInfo
from serve.completion_answer import _Telling
from serve.schemas.completions import CompletionRequest

END: Any = object()  # any result ends the answer
CALL = CompletionRequest(prompt="x", echo=True, logprobs=0)
tokens = st.lists(
    st.tuples(
        st.one_of(st.sampled_from(["a", "é", "🌍", "b\n"]).map(str.encode), st.binary(max_size=3)), st.booleans()
    ),
    max_size=12,
)


def told(prompt: list[TokenInfo], answer: list[TokenInfo], sizes: Iterable[int]) -> tuple[str, dict[str, Any]]:
    """The whole text and all its columns, the tokens coming in so many at a time."""
    telling, decode = _Telling(CALL, ""), codecs.getincrementaldecoder("utf-8")("replace").decode
    events = [ChatEvent(prompt_tokens=tuple(some)) for some in _some(prompt, sizes)]
    for some in _some(answer, sizes):
        shown = b"".join(token.bytes for token in some if not token.silent)
        events.append(ChatEvent(content=decode(shown), tokens=tuple(some)))
    events.append(ChatEvent(content=decode(b"", True), result=END))
    text, columns = "", {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    for event in events:
        telling.hear(event)
        more, logprobs = telling.take()
        text += more
        for name, values in logprobs.model_dump().items() if logprobs else ():
            columns[name] += values
    return text, columns


def _some(all_of_them: list[TokenInfo], sizes: Iterable[int]) -> Iterable[list[TokenInfo]]:
    at = 0
    for size in sizes:
        yield all_of_them[at : at + size]
        at += size
    yield all_of_them[at:]


def made(spelled: list[tuple[bytes, bool]], silent: bool) -> list[TokenInfo]:
    return [
        TokenInfo(i, data.decode("utf-8", "replace"), data, -float(i) - 1, silent=silent and hush)
        for i, (data, hush) in enumerate(spelled)
    ]


@given(tokens.filter(bool), tokens, st.lists(st.integers(0, 4), max_size=6))
def test_offsets_fit_the_text_however_the_tokens_came(
    prompt: list[tuple[bytes, bool]], answer: list[tuple[bytes, bool]], sizes: list[int]
) -> None:
    before, after = made(prompt, silent=False), made(answer, silent=True)
    text, columns = told(before, after, sizes)
    assert (text, columns) == told(before, after, [])
    echoed = b"".join(token.bytes for token in before).decode("utf-8", "replace")
    shown = b"".join(token.bytes for token in after if not token.silent).decode("utf-8", "replace")
    assert text == echoed + shown
    every, offsets = [*before, *after], columns["text_offset"]
    assert len(offsets) == len(columns["tokens"]) == len(every)
    assert offsets == sorted(offsets)
    assert offsets[len(before) :][:1] in ([], [len(echoed)])
    if not any("\ufffd" in token.text for token in every):
        for token, at in zip(every, offsets, strict=True):
            assert token.silent or text[at : at + len(token.text)] == token.text
