"""What passes a proxy passes it unchanged, both ways; what we add for our books, neither side sees."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from serve.settings import SettingsError, load
from tests.misbehaving_upstream import (
    MODELS,
    Script,
    Seen,
    Upstream,
    chunk,
    completion,
    events,
    last_usage,
    plain,
    stream,
    usage,
    whole,
)
from tests.proxied import Proxies, proxies
from tests.servers import CHAT, AppServer, Lock, eventually

TEXT = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxies]:
    with proxies(tmp_path_factory.mktemp("proxies")) as started:
        yield started


@pytest.fixture
def upstream(running: Proxies) -> Upstream:
    running.upstream.reset()
    return running.upstream


@pytest.fixture
def proxy(running: Proxies, upstream: Upstream) -> Proxies:
    return running


def streamed(server: AppServer, path: str = CHAT, **body: Any) -> list[Any]:
    """Every chunk of a streamed answer, without [DONE], which must be the last."""
    sent = {"stream": True, **({"messages": HI} if path == CHAT else {}), **body}
    with server.http.stream("POST", path, json=sent) as response:
        assert response.status_code == 200
        *chunks, done = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(one) for one in chunks]


def ours(server: AppServer, chunks: list[Any], prefix: str = "chatcmpl-") -> list[Any]:
    """The chunks with the upstream's id in place of ours, which must be the row's."""
    row_id = server.rows()[-1].id
    for one in chunks:
        assert one["id"] == f"{prefix}{row_id}"
    return [one | {"id": "chatcmpl-theirs"} for one in chunks]


def test_a_whole_answer_is_passed_on_unchanged_but_for_its_id(upstream, proxy):
    told = completion("Grüße 🌍 \u2028", system_fingerprint="fp_x", service_tier=None, big=12345678901234567890)
    upstream.say(plain(told))
    server = proxy()
    answer = server.chat().json()
    (row,) = server.rows()
    assert answer == told | {"id": f"chatcmpl-{row.id}"}
    assert list(answer) == list(told)
    assert (row.status, row.finish_reason, row.response_text) == ("finished", "stop", "Grüße 🌍 \u2028")


def test_half_a_surrogate_pair_is_passed_on_as_it_came(upstream, proxy):
    choice = '{"index": 0, "message": {"content": "\\ud83d"}, "finish_reason": "stop"}'
    upstream.say(plain(f'{{"id": "x", "choices": [{choice}]}}'))
    assert proxy().chat().json()["choices"][0]["message"]["content"] == "\ud83d"


def test_chunks_are_passed_on_unchanged_but_for_their_ids(upstream, proxy):
    chunks = [
        chunk(role="odd"),
        chunk("Hel"),
        chunk("lö 🌍") | {"x_more": {"a": [None, True]}},
        {**chunk(), "choices": [{"index": 0, "delta": {"x_unknown": 1}, "finish_reason": None}]},
        {**chunk(), "choices": [], "x_filter_results": []},
        chunk(finish="stop", timings={"predicted_n": 2}),
    ]
    upstream.say(stream(*chunks))
    server = proxy()
    assert ours(server, streamed(server)) == chunks
    (row,) = server.rows()
    assert (row.status, row.finish_reason, row.response_text) == ("finished", "stop", "Hellö 🌍")
    assert row.parameters["upstream"]["id"] == "chatcmpl-theirs"


@pytest.mark.parametrize("end", [b"\r\n", b"\r", b"\n"])
def test_a_stream_may_arrive_in_any_pieces_and_with_any_line_ends(upstream, proxy, end):
    chunks = [chunk("Grüße 🌍"), chunk(finish="length")]
    text = (b": comment\n\n" + events(*chunks)).replace(b"\n", end)
    pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    upstream.say(Script([part for piece in pieces for part in (piece, 0.0001)], framing="chunked"))
    server = proxy()
    assert ours(server, streamed(server)) == chunks
    assert server.rows()[0].finish_reason == "length"


def test_events_by_another_name_are_events(upstream, proxy):
    upstream.say(stream(chunk("Hel"), chunk(finish="stop"), content_type="text/plain"))
    server = proxy()
    assert ours(server, streamed(server)) == [chunk("Hel"), chunk(finish="stop")]


@pytest.mark.parametrize("stream_it", [False, True])
def test_an_upstream_may_compress_though_it_is_asked_not_to(upstream, proxy, stream_it):
    said = events(chunk("Hel"), chunk(finish="stop")) if stream_it else json.dumps(completion("Hel")).encode()
    kind = "text/event-stream" if stream_it else "application/json"
    upstream.say(Script((gzip.compress(said),), content_type=kind, headers={"Content-Encoding": "gzip"}))
    server = proxy()
    assert server.chat(stream=stream_it).status_code == 200
    assert server.rows()[0].response_text == "Hel"
    assert upstream.posts[0].headers["accept-encoding"] == "identity"


def test_the_clients_body_is_passed_on_with_fields_that_nobody_knows(upstream, proxy):
    body = {
        "model": "other",
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}], "x": 1}],
        "x_unknown": {"deep": [1, 2.5, None, "ü"]},
        "temperature": 17,
        "tools": [{"type": "odd"}],
        "stop": None,
        "store": True,
    }
    server = proxy()
    assert server.http.post(CHAT, json=body).status_code == 200
    (seen,) = upstream.posts
    assert seen.path == CHAT
    assert seen.body == body | {"return_token_ids": True, "return_tokens": True}
    assert server.rows()[0].request == body


def test_a_request_that_names_no_model_gets_ours_and_an_alias_is_its_name(upstream, proxy):
    server = proxy(model="far-away", served_model_name="near,here")
    for name in (None, "near", "here", "another"):
        assert server.chat(**({} if name is None else {"model": name})).status_code == 200
    assert [seen.body["model"] for seen in upstream.posts] == ["far-away", "far-away", "far-away", "another"]
    assert [row.model for row in server.rows()] == ["near", "near", "here", "another"]


def test_the_first_model_of_the_upstream_is_the_default(upstream, proxy):
    server = proxy()
    server.chat()
    assert upstream.posts[0].body["model"] == "far"
    assert server.http.get("/version").json()["max_model_len"] == 777


def test_only_our_key_goes_to_the_upstream(upstream, proxy):
    server = proxy(key="sk-ours")
    upstream.say(plain(completion(), headers={"Set-Cookie": "session=1; Path=/"}))
    secrets = {"Authorization": "Bearer sk-client", "x-api-key": "sk-client", "Cookie": "c=sk-client"}
    for _ in range(2):
        assert server.http.post(CHAT, json={"messages": HI}, headers=secrets).status_code == 200
    for seen in (*upstream.posts, *upstream.looks):
        assert seen.headers["authorization"] == "Bearer sk-ours"
        assert "sk-client" not in str(seen.headers)
        assert "cookie" not in seen.headers
    assert [seen.headers["x-request-id"] for seen in upstream.posts] == [row.id for row in server.rows()]
    assert "sk-" not in str([row.request for row in server.rows()])


@pytest.mark.parametrize(
    ("headers", "more", "passed_on"),
    [({"X-Draftloop-Capture": "off"}, {}, "off"), ({}, {"store": False}, "off"), ({}, {}, None)],
)
def test_what_is_not_to_be_kept_here_is_not_to_be_kept_there(upstream, proxy, headers, more, passed_on):
    server = proxy()
    assert server.http.post(CHAT, json={"messages": HI, **more}, headers=headers).status_code == 200
    assert upstream.posts[0].headers.get("x-draftloop-capture") == passed_on
    assert len(server.rows()) == (passed_on is None)


def test_without_a_key_none_is_sent(upstream, proxy):
    server = proxy()
    server.http.post(CHAT, json={"messages": HI}, headers={"Authorization": "Bearer sk-client"})
    assert "authorization" not in upstream.posts[0].headers


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": HI, "stream": "yes"}, "stream"),
        ({"messages": HI, "n": 0}, "n"),
        ({"messages": HI, "store": "no"}, "store"),
        ({"messages": HI, "stream_options": 1}, "stream_options"),
    ],
)
def test_what_we_must_understand_is_checked_here(upstream, proxy, body, param):
    refused = proxy().http.post(CHAT, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert upstream.posts == []


def test_models_are_the_upstreams(upstream, proxy):
    server = proxy()
    assert server.http.get("/v1/models").json() == MODELS
    assert server.http.get("/v1/models/far").json() == MODELS["data"][0]
    assert server.http.get("/v1/models/near").json()["error"]["code"] == "model_not_found"
    assert [model.id for model in server.openai.models.list()] == ["far"]


def test_endpoints_that_need_the_model_itself_are_not_there(upstream, proxy):
    server = proxy()
    for path in ("/tokenize", "/v1/responses"):
        assert server.http.post(path, json={}).status_code == 404


def test_text_completions_are_passed_on_too(upstream, proxy):
    choice = {"index": 0, "text": "ab", "finish_reason": "length"}
    told = {"id": "chatcmpl-theirs", "object": "text_completion", "choices": [choice], "x": 1}
    chunks = [
        {**told, "choices": [{"index": 0, "text": "ab", "finish_reason": None}]},
        {**told, "choices": [{"index": 0, "text": "", "finish_reason": "length"}]},
    ]
    upstream.answer = lambda seen: stream(*chunks) if seen.body.get("stream") else plain(told)
    server = proxy()
    assert ours(server, [server.http.post(TEXT, json={"prompt": [5, 6, 7]}).json()], "cmpl-") == [told]
    assert ours(server, streamed(server, TEXT, prompt="Hi"), "cmpl-") == chunks
    first, second = server.rows()
    assert [seen.path for seen in upstream.posts] == [TEXT, TEXT]
    assert (first.response_text, list(first.prompt_tokens)) == ("ab", [5, 6, 7])
    assert (second.response_text, second.finish_reason, second.prompt_tokens) == ("ab", "length", None)


# Usage


def test_usage_is_asked_for_and_hidden_from_a_client_that_did_not(upstream, proxy):
    server = proxy()
    assert ours(server, streamed(server)) == [chunk("Hello"), chunk(finish="stop")]
    assert upstream.posts[0].body["stream_options"] == {"include_usage": True}
    assert server.metric("prompt_tokens_total") == 5
    assert server.metric("generation_tokens_total") == 2
    assert server.rows()[0].parameters["upstream"]["usage"] == usage()


def test_a_client_that_asks_for_usage_gets_it(upstream, proxy):
    server = proxy()
    options = {"include_usage": True, "x": 1}
    *middle, last = ours(server, streamed(server, stream_options=options))
    assert [one["usage"] for one in middle] == [None, None]
    assert last == last_usage()
    assert upstream.posts[0].body["stream_options"] == options


def test_what_came_with_the_hidden_usage_is_not_lost(upstream, proxy):
    upstream.say(stream(chunk("a"), chunk(finish="stop"), last_usage(timings={"predicted_n": 2})))
    server = proxy()
    assert ours(server, streamed(server)) == [chunk("a"), chunk(finish="stop", timings={"predicted_n": 2})]


def strict(refuses: Callable[[dict[str, Any]], str | None]) -> Callable[[Seen], Script]:
    """An upstream that refuses what it does not know, in the words that `refuses` gives it."""

    def answer(seen: Seen) -> Script:
        words = refuses(seen.body)
        return whole(seen, "Hello") if words is None else plain({"error": {"message": words, "code": 9}}, 400)

    return answer


def naming(*fields: str) -> Callable[[dict[str, Any]], str | None]:
    return lambda body: next((f"Unknown parameter: '{name}'." for name in fields if name in body), None)


@pytest.mark.parametrize(
    ("refuses", "asks"),
    [
        (naming("stream_options"), [True, True]),
        (naming("return_token_ids"), [False, True]),
        (naming("return_token_ids", "return_tokens"), [False, False]),
        (naming("return_token_ids", "return_tokens", "stream_options"), [False, False]),
        (lambda body: "no" if {"return_tokens", "stream_options"} & body.keys() else None, [False, False]),
    ],
)
def test_an_upstream_that_refuses_our_questions_is_not_asked_them_again(upstream, proxy, refuses, asks):
    upstream.answer = strict(refuses)
    server = proxy(look_every=60)
    assert ours(server, streamed(server)) == [chunk("Hello"), chunk(finish="stop")]
    tried = len(upstream.posts)
    assert tried > 1
    assert ours(server, streamed(server)) == [chunk("Hello"), chunk(finish="stop")]
    assert len(upstream.posts) == tried + 1
    last = upstream.posts[-1].body
    assert [last.get("return_token_ids", False), last.get("return_tokens", False)] == asks
    assert [row.status for row in server.rows()] == ["finished", "finished"]


def test_a_bad_request_is_the_clients_fault_and_teaches_nothing(upstream, proxy):
    upstream.answer = strict(lambda body: "temperature is too high" if "temperature" in body else None)
    server = proxy(look_every=60)
    refused = server.chat(temperature=9)
    assert (refused.status_code, refused.json()) == (400, {"error": {"message": "temperature is too high", "code": 9}})
    assert "return_token_ids" not in upstream.posts[-1].body
    assert server.chat().status_code == 200
    assert upstream.posts[-1].body["return_token_ids"] is True
    before = len(upstream.posts)
    assert server.chat(temperature=9).status_code == 400
    assert len(upstream.posts) == before + 1  # an upstream that took our questions once does not mind them


# Token ids


def with_ids(content: str, ids: list[int], finish: str | None = None, **more: Any) -> dict[str, Any]:
    told = chunk(content, finish, **more)
    told["choices"][0]["token_ids"] = ids
    return told


def test_token_ids_that_we_asked_for_are_kept_and_hidden(upstream, proxy):
    logprobs = {"content": [{"token": "a", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
    first = with_ids("a", [11], prompt_token_ids=[1, 2, 3])
    first["choices"][0]["logprobs"] = logprobs
    second = with_ids("b", [12, 13])
    second["choices"][0]["logprobs"] = {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}
    rest = events(second, chunk(finish="stop"), last_usage(usage=usage(3, 3)))
    upstream.say(Script((events(first, done=False), 0.2, rest)))
    server = proxy()
    told = ours(server, streamed(server))
    assert "token_ids" not in json.dumps(told)
    assert told[0]["choices"][0]["logprobs"] == logprobs
    (row,) = server.rows()
    assert list(row.prompt_tokens) == [1, 2, 3]
    assert list(row.completion_tokens) == [11, 12, 13]
    assert list(row.logprobs) == [-0.5, -1.0, -2.0]
    assert server.metric("generation_tokens_total") == 3
    assert server.metric("inter_token_latency_seconds_count") == 2
    assert row.weights_fingerprint == f"upstream:{upstream.url}/v1#far"


def test_token_ids_that_the_client_asked_for_are_told(upstream, proxy):
    chunks = [with_ids("a", [11], prompt_token_ids=[1, 2, 3]), with_ids("", [12], "stop")]
    upstream.say(stream(*chunks))
    server = proxy()
    assert ours(server, streamed(server, return_token_ids=True)) == chunks


def test_a_whole_answers_token_ids_are_kept_and_hidden(upstream, proxy):
    told = completion("ab", prompt_token_ids=[1, 2])
    told["choices"][0]["token_ids"] = [3, 4]
    upstream.say(plain(told))
    server = proxy()
    answer = server.chat().json()
    assert "token_ids" not in json.dumps(answer)
    (row,) = server.rows()
    assert (list(row.prompt_tokens), list(row.completion_tokens)) == ([1, 2], [3, 4])


def test_llama_cpps_tokens_are_ids_too(upstream, proxy):
    upstream.say(stream(chunk("a", tokens=[3]), chunk("b", tokens=[4]), chunk(finish="stop")))
    server = proxy()
    assert ours(server, streamed(server)) == [chunk("a"), chunk("b"), chunk(finish="stop")]
    assert list(server.rows()[0].completion_tokens) == [3, 4]
    told = completion("ab", __verbose={"tokens": [5, 6]})
    upstream.say(plain(told))
    assert ours(server, [server.chat().json()]) == [told]
    assert list(server.rows()[1].completion_tokens) == [5, 6]


def test_ids_that_are_not_all_of_them_are_none(upstream, proxy):
    upstream.say(stream(with_ids("a", [11]), chunk("bc"), chunk(finish="stop"), last_usage(usage=usage(5, 3))))
    server = proxy()
    streamed(server)
    (row,) = server.rows()
    assert (row.response_text, row.completion_tokens, row.prompt_tokens, row.logprobs) == ("abc", None, None, None)
    assert server.metric("generation_tokens_total") == 3


def test_an_answer_without_ids_is_kept_as_text_alone(upstream, proxy):
    server = proxy()
    streamed(server)
    (row,) = server.rows()
    assert (row.prompt_tokens, row.completion_tokens, row.logprobs, row.seed) == (None, None, None, None)
    assert (row.response_text, row.status, row.drafter) == ("Hello", "finished", "upstream")
    assert server.metric("time_to_first_token_seconds_count") == 1


# Choices, tools, reasoning


def test_every_choice_is_a_row_and_no_end_leaves_before_them(upstream, proxy):
    chunks = [
        chunk("a"),
        chunk("x", index=1),
        chunk(finish="stop"),
        chunk("y", index=1),
        chunk(finish="length", index=1),
    ]
    upstream.say(stream(*chunks, last_usage(usage=usage(5, 4))))
    server = proxy()
    told = streamed(server, n=2)
    first, second = server.rows()
    assert {one["id"] for one in told} == {f"chatcmpl-{first.id}"}
    for index in (0, 1):
        mine = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == index]
        assert [one["choices"][0] for one in told if one["choices"][0]["index"] == index] == mine
    assert [(row.response_text, row.finish_reason, row.parameters["choice"]) for row in (first, second)] == [
        ("a", "stop", 0),
        ("xy", "length", 1),
    ]
    assert second.parameters["response"] == first.id
    assert server.metric("prompt_tokens_total") == 5
    assert server.metric("generation_tokens_total") == 4
    assert len(upstream.posts) == 1


def test_tool_calls_and_reasoning_are_kept(upstream, proxy):
    def delta(**said: Any) -> dict[str, Any]:
        return {**chunk(), "choices": [{"index": 0, "delta": said, "finish_reason": None}]}

    def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
        name = {"name": more.pop("name")} if "name" in more else {}
        return {"index": index, "function": {**name, "arguments": arguments}, **more}

    chunks = [
        delta(reasoning_content="Hm"),
        delta(reasoning="m."),
        delta(tool_calls=[call(0, "", id="c1", type="function", name="f"), call(1, '{"b"', id="c2", name="g")]),
        delta(tool_calls=[call(1, ": 2}")]),
        delta(tool_calls=[call(0, '{"a": 1}')]),
        chunk(finish="tool_calls"),
    ]
    upstream.say(stream(*chunks))
    server = proxy()
    assert ours(server, streamed(server)) == chunks
    (row,) = server.rows()
    assert (row.reasoning, row.response_text, row.finish_reason) == ("Hmm.", "", "stop")
    assert row.parameters["upstream"]["finish_reason"] == "tool_calls"
    assert [(one["id"], one["function"]) for one in row.tool_calls] == [
        ("c1", {"name": "f", "arguments": '{"a": 1}'}),
        ("c2", {"name": "g", "arguments": '{"b": 2}'}),
    ]


# Capture


def test_a_client_that_opts_out_leaves_counts_alone(upstream, proxy):
    server = proxy()
    assert server.chat(store=False).status_code == 200
    assert server.http.post(CHAT, json={"messages": HI}, headers={"X-Draftloop-Capture": "off"}).status_code == 200
    assert server.rows() == []
    assert upstream.posts[0].body["store"] is False
    assert server.metric("capture_generations_total", status="opted_out") == 2
    assert server.metric("generation_tokens_total") == 4


@pytest.mark.parametrize("stream_it", [False, True])
def test_nothing_that_says_the_end_leaves_before_the_row_is_committed(upstream, proxy, stream_it):
    server = proxy(capture_commit_timeout=60)
    lock = Lock(server.capture)
    lines: list[str] = []

    def read() -> None:
        with server.http.stream("POST", CHAT, json={"messages": HI, "stream": stream_it}) as response:
            for line in response.iter_lines():
                lines.append(line)

    reader = threading.Thread(target=read)
    reader.start()
    eventually(lambda: server.metric("capture_queue_depth") == 1, 20)
    assert server.service.running == 1
    assert not any('"stop"' in line for line in lines)
    lock.release()
    reader.join(20)
    assert sum('"stop"' in line for line in lines) == 1
    assert [row.status for row in server.rows()] == ["finished"]
    assert server.metric("capture_late_total") == 0


def test_connections_are_used_again(upstream, proxy):
    upstream.answer = lambda seen: Script(whole(seen, "Hello").steps, framing="chunked")
    server = proxy(look_every=60)
    for _ in range(5):
        streamed(server)
    # The watcher has one of its own now and then.
    assert len(upstream.posts) == 5
    assert upstream.connections < 5


# What the upstream counts


def test_the_upstreams_speculation_is_told_under_our_names(upstream, proxy):
    labels = 'engine="0",model_name="far"'
    upstream.gets["/metrics"] = f"""# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{{labels}}} 10.0
vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e9
vllm:spec_decode_num_draft_tokens_total{{{labels}}} 30.0
vllm:spec_decode_num_accepted_tokens_total{{{labels}}} 17.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}} 8.0
vllm:num_requests_running{{{labels}}} 99.0
"""
    server = proxy(look_every=0.1)
    up = {"drafter": "upstream"}
    assert server.metric("spec_decode_num_drafts_total", **up) == 10
    assert server.metric("spec_decode_num_draft_tokens_total", **up) == 30
    assert server.metric("spec_decode_num_accepted_tokens_total", **up) == 17
    assert server.metric("spec_decode_num_accepted_tokens_per_pos_total", **up, position="1") == 8
    assert server.metric("num_requests_running") == 0
    text = server.http.get("/metrics").text
    for absent in ("draft_tokens_per_pos", "kv_cache", "prefix_cache", "preemptions", "draft_length"):
        assert absent not in text
    upstream.gets["/metrics"] = "llamacpp:n_drafted_total 8\nllamacpp:n_drafted_accepted_total 5\n"
    eventually(lambda: server.metric("spec_decode_num_draft_tokens_total", **up) == 8, 20)
    assert server.metric("spec_decode_num_accepted_tokens_total", **up) == 5
    del upstream.gets["/metrics"]
    eventually(lambda: "spec_decode" not in server.http.get("/metrics").text, 20)


@pytest.mark.parametrize("text", ["not metrics at all {", '{"error": 1}', "\x00\xff"])
def test_metrics_that_cannot_be_read_are_absent(upstream, proxy, text):
    upstream.gets["/metrics"] = text
    server = proxy(look_every=0.1)
    assert "spec_decode" not in server.http.get("/metrics").text


def test_a_proxy_is_ready_while_its_upstream_answers(upstream, proxy):
    server = proxy(look_every=0.1)
    assert server.http.get("/ready").status_code == 200
    del upstream.gets["/v1/models"]
    eventually(lambda: server.http.get("/ready").status_code == 503, 20)
    assert server.http.get("/health").status_code == 200
    assert server.chat().status_code == 200  # how an upstream is, a request finds out best
    upstream.gets["/health"] = "ok"
    eventually(lambda: server.http.get("/ready").status_code == 200, 20)


@pytest.mark.parametrize("option", [{"drafter": "mtp"}, {"device": "cpu"}, {"max_model_len": "9"}])
def test_what_only_an_engine_has_cannot_be_asked_of_a_proxy(option):
    (name,) = option
    with pytest.raises(SettingsError, match=f"--{name.replace('_', '-')} .*no engine here"):
        load(upstream="http://host", **option)
