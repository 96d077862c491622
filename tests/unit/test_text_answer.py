"""Token by token an answer reads exactly as it would in one piece: detokenizer, stop strings, reasoning."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend.text.answer import AnswerText
from backend.text.detokenizer import Detokenizer
from backend.text.reasoning import ReasoningSplitter
from backend.text.stops import StopMatcher
from tests.qwen_tokenizer import loaded

REAL_IDS = st.lists(st.integers(0, 248_319), max_size=40)
# Byte tokens make broken and split characters likely; ids 0 … 255 are the single bytes of this vocabulary.
BYTE_IDS = st.lists(st.one_of(st.integers(0, 255), st.sampled_from([248_045, 248_046, 248_069])), max_size=40)
EMOJI = "👩‍👩‍👧 e\u0301 مرحبا 🤖".encode()


def decode(ids: list[int]) -> str:
    return b"".join(map(loaded().text_bytes, ids)).decode("utf-8", errors="replace")


@given(st.one_of(REAL_IDS, BYTE_IDS))
@settings(deadline=None)
def test_streamed_text_equals_the_whole_for_any_tokens(ids: list[int]) -> None:
    detokenizer = Detokenizer(loaded().text_bytes)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == decode(ids)


@given(st.lists(st.binary(max_size=5), max_size=12))
@example([EMOJI[:3], EMOJI[3:7], EMOJI[7:]])
@example([b"\xf0\x9f", b"a", b"\x98\x80\xff", b"\xe2\x82"])
def test_streamed_text_equals_the_whole_for_any_bytes(pieces: list[bytes]) -> None:
    detokenizer = Detokenizer(pieces.__getitem__)
    streamed = "".join(map(detokenizer.push, range(len(pieces)))) + detokenizer.flush()
    assert streamed == b"".join(pieces).decode("utf-8", errors="replace")


def test_half_a_character_is_never_shown() -> None:
    detokenizer = Detokenizer(lambda byte: bytes([byte]))
    assert [detokenizer.push(byte) for byte in "é🤖".encode()] == ["", "é", "", "", "", "🤖"]
    assert detokenizer.flush() == ""


def test_special_tokens_are_not_text_but_tags_are() -> None:
    names = ["<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|endoftext|>"]
    ids = [index for name in names if (index := loaded().literal_id(name)) is not None]
    assert len(ids) == len(names)
    assert decode(ids) == "<think></think><tool_call></tool_call>"


@st.composite
def answers_with_stops(draw: st.DrawFn) -> tuple[list[int], list[str]]:
    ids = draw(st.one_of(REAL_IDS, BYTE_IDS))
    text = decode(ids)
    spans = st.tuples(st.integers(0, len(text)), st.integers(1, 8)).map(lambda span: text[span[0] : sum(span)])
    return ids, [stop for stop in draw(st.lists(spans, max_size=3)) if stop]


@given(answers_with_stops())
@settings(deadline=None)
def test_pieces_join_to_the_answer_up_to_its_stop_string(case: tuple[list[int], list[str]]) -> None:
    ids, stops = case
    answer, shown, stop = AnswerText(loaded().text_bytes, stops), "", None
    for token_id in ids:
        piece = answer.push(token_id)
        shown, stop = shown + piece.text, piece.stop
        if stop is not None:
            break
    else:
        piece = answer.finish()
        shown, stop = shown + piece.text, piece.stop
    whole = StopMatcher(stops)
    before, expected = whole.push(decode(ids))
    assert (shown, stop) == (before + whole.flush(), expected)


def test_an_unfinished_character_at_the_end_may_complete_a_stop_string() -> None:
    answer = AnswerText(lambda byte: bytes([byte]), ["a\ufffd"])
    assert [answer.push(byte).text for byte in (0x62, 0x61, 0xF0)] == ["b", "", ""]
    piece = answer.finish()
    assert (piece.text, piece.stop) == ("", "a\ufffd")


def test_a_stop_string_counts_in_the_reasoning_too() -> None:
    ids = loaded().plain("so what")
    end = loaded().literal_id("</think>")
    assert end is not None
    answer, splitter = AnswerText(loaded().text_bytes, ["</think>"]), ReasoningSplitter(True)
    pieces = [answer.push(token_id) for token_id in [*ids, end]]
    splits = [*(splitter.push(piece.text) for piece in pieces), splitter.finish()]
    assert pieces[-1].stop == "</think>"
    assert "".join(s.reasoning for s in splits) == "so what"
