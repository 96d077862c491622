"""An upstream's answer in our books: no shape breaks them, and a stream adds up to what the whole answer says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.interface import BackendError, Fingerprints
from backend.upstream.answer import Books
from backend.upstream.backend import UpstreamBackend, UpstreamOptions
from backend.upstream.faults import in_band, parsed
from backend.upstream.passage import Passage
from backend.upstream.request import IDS, USAGE, Manners, compose, hide
from capture.records import new_id, to_row, utc_now
from serve.record import Origin, to_generation

PRINTS = Fingerprints("upstream:w", "upstream:t", "upstream:c", "upstream:d", "upstream")
EXTRAS = frozenset({USAGE, *IDS})
FIELDS = """
id choices index delta message content reasoning_content reasoning tool_calls function function_call name
arguments finish_reason logprobs token_logprobs logprob text token_ids tokens prompt_token_ids usage
prompt_tokens completion_tokens prompt_tokens_details cached_tokens error code object detail model
"""
NAMES = st.sampled_from(FIELDS.split())
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text("aü🌍\ud83d", max_size=3)
    | st.just("error"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are shared
CHOICES = st.lists(st.dictionaries(NAMES, ANYTHING, max_size=6) | ANYTHING, max_size=3)
CHUNKS = st.dictionaries(NAMES, ANYTHING, max_size=5).flatmap(
    lambda chunk: CHOICES.map(lambda choices: {**chunk, "choices": choices}) | st.just(chunk)
)


@PATIENT
@given(st.lists(CHUNKS, max_size=4), st.dictionaries(NAMES | st.sampled_from(["prompt", "n", "seed"]), ANYTHING))
def test_no_shape_is_too_odd_to_be_kept(chunks, raw):
    books = Books(raw, PRINTS)
    passage = Passage(books, "chatcmpl-ours", EXTRAS)
    passage.take([json.dumps(chunk).encode() for chunk in chunks])
    result = books.result("error", passage.failure)
    for one in (result, *result.upstream.siblings):
        row = to_row(to_generation(Origin("m", {}, created_at=utc_now(), id=new_id()), one))
        assert row["drafter"] == "upstream"


@PATIENT
@given(CHUNKS)
def test_hiding_what_nobody_sent_changes_nothing(chunk):
    fields = {"usage", *(name for names in IDS.values() for name in names)}
    before = json.dumps(chunk)
    if not any(f'"{name}"' in before for name in fields):
        hide(chunk, EXTRAS)
        assert json.dumps(chunk) == before
    in_band(chunk)


@given(st.binary(max_size=30))
def test_bytes_are_a_json_object_or_nothing(data):
    value = parsed(data)
    assert value is None or isinstance(value, dict)


WORDS = st.lists(st.text("aü🌍\n", max_size=4), max_size=4)


@PATIENT
@given(WORDS, WORDS, st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=3), max_size=4))
def test_a_stream_adds_up_to_the_whole_answer(thoughts, words, ids):
    said = [{"reasoning_content": one} for one in thoughts] + [{"content": one} for one in words]
    pieces: list[dict[str, Any]] = [{"index": 0, "delta": one} for one in said]
    pieces += [{"index": 0, "delta": {}, "token_ids": some} for some in ids]
    pieces += [{"index": 0, "delta": {}, "finish_reason": "length"}]
    streamed, whole = Books({}, PRINTS), Books({}, PRINTS)
    for piece in pieces:
        streamed.take({"choices": [piece]})
    message = {"reasoning_content": "".join(thoughts), "content": "".join(words)}
    together = [one for some in ids for one in some]
    whole.take({"choices": [{"index": 0, "message": message, "token_ids": together, "finish_reason": "length"}]})
    a, b = streamed.result(), whole.result()
    assert replace(a, timings=b.timings) == b
    assert streamed.ended
    assert streamed.whole


def test_every_prompt_and_choice_must_end_before_an_answer_is_whole():
    books = Books({"prompt": ["a", "b"], "n": 2}, PRINTS)
    for index in range(4):
        assert not books.whole
        books.take({"choices": [{"index": index, "text": "x", "finish_reason": "stop", "prompt_token_ids": [index]}]})
    assert books.whole
    result = books.result()
    assert [one.prompt_ids for one in (result, *result.upstream.siblings)] == [(0,), (1,), (2,), (3,)]


def test_prompts_sent_as_ids_are_known_without_being_told():
    books = Books({"prompt": [[1, 2], [3]], "n": 2}, PRINTS)
    for index in range(4):
        books.take({"choices": [{"index": index, "text": "x", "finish_reason": "stop"}]})
    result = books.result()
    assert [one.prompt_ids for one in (result, *result.upstream.siblings)] == [(1, 2), (1, 2), (3,), (3,)]


def test_what_is_refused_is_left_out_and_what_was_taken_once_is_never_blamed():
    manners = Manners()
    first = manners.extras({}, stream=True)
    assert first == {USAGE, *IDS}
    second = manners.fewer(first, "what is return_tokens?")
    assert second == {USAGE, "return_token_ids"}
    manners.learn(second, first - second)
    assert manners.extras({}, stream=True) == second
    assert manners.extras({}, stream=False) == {"return_token_ids"}
    assert manners.fewer(second, "return_token_ids is bad") is None


def test_a_clients_own_questions_are_not_ours():
    manners = Manners()
    body = {"return_token_ids": True, "stream_options": {"include_usage": True, "x": 1}}
    assert manners.extras(body, stream=True) == {"return_tokens"}
    assert compose(body, frozenset(), None) == body
    quiet = {"stream_options": {"include_usage": False, "x": 1}, "return_token_ids": False}
    assert compose(quiet, manners.extras(quiet, stream=True), "m") == {
        "model": "m",
        "stream_options": {"include_usage": True, "x": 1},
        "return_token_ids": True,
        "return_tokens": True,
    }


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/", "http://host:8000/v1"),
        ("https://host/v1/", "https://host/v1"),
        ("https://host/openai/v1", "https://host/openai/v1"),
        ("http://[::1]:8080", "http://[::1]:8080/v1"),
        ("http://host/a b/", "http://host/a%20b"),
    ],
)
def test_the_urls_v1_may_be_left_out(url, base):
    assert UpstreamBackend(UpstreamOptions(url)).engine()["upstream"] == base


@pytest.mark.parametrize(
    "url",
    [
        "host:8000",
        "ftp://host",
        "http://",
        "http://host:x",
        "http://host:99999",
        "http://u:p@host",
        "http://host?a=1",
        "http://host#a",
        "http://[::1",
        "http://\x7f",
        "http://xn--zzzzzz--.invalid",
    ],
)
def test_a_url_that_is_none_is_refused_without_telling_its_secrets(url):
    with pytest.raises(BackendError) as refused:
        UpstreamBackend(UpstreamOptions(url))
    assert "p@" not in str(refused.value)


def test_a_call_may_tell_its_name_and_id_in_any_of_its_pieces() -> None:
    books = Books({}, PRINTS)
    for piece in ({"function": {"arguments": "{"}}, {"id": "c", "function": {"name": "f", "arguments": "}"}}):
        books.take({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **piece}]}}]})
    (call,) = books.result().tool_calls
    assert (call.id, call.name, call.arguments) == ("c", "f", "{}")
