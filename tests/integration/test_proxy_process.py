"""A proxy before a real server, our own: through it the answers are those of asking directly, and so are the rows."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from backend.upstream.backend import UpstreamBackend, UpstreamOptions
from tests.answers import joined
from tests.checkpoints import random_small
from tests.fake_backend import Script
from tests.servers import (
    CHAT,
    MODEL,
    AppServer,
    ProcessServer,
    Server,
    eventually,
    running_app,
    running_process,
    serve_command,
)

KEY = "sk-between-the-two"
SERVE = [sys.executable, "-c", "from serve.cli import main; main()"]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
HI = [{"role": "user", "content": "Hi"}]
# What a model says must be settled by its seed; what it cost may differ.
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    "sampled": {"temperature": 1.2, "seed": 1, "logprobs": True},
    "ids": {"temperature": 1, "seed": 2, "return_token_ids": True},
    "choices": {"seed": 4, "n": 3, "temperature": 1.5, "logprobs": True},
    "no thinking": {"seed": 5, "chat_template_kwargs": {"enable_thinking": False}, "stop": ["e"]},
}
SCRIPTS = {
    "says": Script(),
    "thinks": Script(thought=(b"Let ", b"m\xc3", b"\xa4"), cached=3),
    "calls": Script(thought=(b"hm",), calls=(("look", '{"at":', ' "ä"}'), ("look", "{}"))),
}


def plain(body: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs between two answers to the same."""
    text = json.dumps({name: value for name, value in body.items() if name not in ("id", "created", "timings")})
    kept: dict[str, Any] = json.loads(re.sub(r"call_\w+", "call_", text))
    for choice in kept["choices"]:
        choice.pop("timings", None)
    return kept


def whole(server: Server, asked: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    answer = server.http.post(path, json=asked)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def chunks(server: Server, asked: dict[str, Any], path: str = CHAT) -> list[dict[str, Any]]:
    text = server.http.post(path, json={**asked, "stream": True}).text
    *lines, done = [line.removeprefix("data: ") for line in text.split("\n") if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, ProcessServer]]:
    """A server on a model, which wants a key, and a proxy before it, which has that key and wants none."""
    path = tmp_path_factory.mktemp("proxied")
    command = serve_command(random_small(), "--api-key", f"proxy={KEY}", "--prefix-cache", "off")
    with running_process(command, path / "direct.db") as direct:
        direct.http.headers["Authorization"] = f"Bearer {KEY}"
        with running_process(
            ["env", f"DRAFTLOOP_UPSTREAM_API_KEY={KEY}", *SERVE, "--upstream", direct.url], path / "proxy.db"
        ) as proxy:
            yield direct, proxy


@contextmanager
def proxied(direct: str, path: Path) -> Iterator[AppServer]:
    """The app before the server at that URL."""
    backend = UpstreamBackend(UpstreamOptions(direct, look_every=0.2))
    given = {"capture": path / "proxy.db", "upstream": direct, "metrics_compat": "vllm"}
    with running_app(backend=backend, **given) as proxy:  # type: ignore[arg-type]
        yield proxy


@pytest.fixture(scope="module", params=SCRIPTS)
def scripted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, ...]]:
    """A server that recites, and a proxy before it."""
    path = tmp_path_factory.mktemp("scripted")
    with running_app(SCRIPTS[request.param], capture=path / "direct.db") as direct, proxied(direct.url, path) as proxy:
        yield direct, proxy


@pytest.mark.parametrize("name", ASKED)
def test_through_the_proxy_a_model_says_the_same(servers, name):
    direct, proxy = servers
    asked = {"model": MODEL, "messages": HI, "max_tokens": 24, **ASKED[name]}
    told = plain(whole(proxy, asked))
    assert told == plain(whole(direct, asked))
    with_usage = {**asked, "stream_options": {"include_usage": True}}
    assert plain(joined(chunks(proxy, with_usage))) == plain(joined(chunks(direct, with_usage))) == told


def test_the_proxys_rows_hold_what_the_models_own_hold(servers):
    direct, proxy = servers
    asked = {"messages": HI, "max_tokens": 24, "logprobs": True, "temperature": 1.2, "n": 2}
    for ask in (whole, chunks):
        before = {row.id for row in (*direct.rows(), *proxy.rows())}
        ask(proxy, asked)
        theirs, ours = ([row for row in server.rows() if row.id not in before] for server in (direct, proxy))
        assert len(theirs) == len(ours) == 2
        for their, our in zip(theirs, ours, strict=True):
            assert list(our.prompt_tokens) == list(their.prompt_tokens)
            assert list(our.completion_tokens) == list(their.completion_tokens) != []
            assert np.array_equal(our.logprobs, their.logprobs)
            assert (our.response_text, our.reasoning) == (their.response_text, their.reasoning)
            assert (our.status, our.finish_reason) == (their.status, their.finish_reason)
            assert our.weights_fingerprint == f"upstream:{direct.url}/v1#{MODEL}"
        assert ours[0].parameters["upstream"]["id"] == f"chatcmpl-{theirs[0].id}"
        assert KEY not in str([row.request for row in ours])
        assert {row.client for row in theirs} == {"proxy"}


def test_text_completions_through_the_proxy_are_the_same(servers):
    direct, proxy = servers
    asked = {"prompt": ["Say", "Tell me"], "max_tokens": 8, "seed": 3, "logprobs": 1, "n": 2}
    assert plain(whole(proxy, asked, "/v1/completions")) == plain(whole(direct, asked, "/v1/completions"))
    told, straight = (
        [(one["choices"][0]["index"], one["choices"][0]["text"]) for one in chunks(server, asked, "/v1/completions")]
        for server in servers[::-1]
    )
    for index in range(4):
        assert [text for i, text in told if i == index] == [text for i, text in straight if i == index]
    rows = proxy.rows()[-4:]
    assert len({tuple(row.prompt_tokens) for row in rows}) == 2
    assert {len(row.completion_tokens) for row in rows} <= set(range(1, 9))


def test_the_openai_client_works_through_the_proxy(servers):
    _, proxy = servers
    client = proxy.openai
    assert [model.id for model in client.models.list()] == [MODEL]
    answer = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=5, logprobs=True)
    assert answer.choices[0].logprobs is not None
    with client.chat.completions.stream(model=MODEL, messages=HI, max_tokens=5) as stream:
        stream.until_done()
        assert stream.current_completion_snapshot.choices[0].finish_reason in ("stop", "length")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=9)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=HI)


@pytest.mark.parametrize("stream_options", [None, {"include_usage": True}])
def test_through_the_proxy_chunks_are_the_same_one_by_one(scripted, stream_options):
    direct, proxy = scripted
    asked = {"messages": HI, "tools": [TOOL], "stream_options": stream_options}
    theirs, ours = ([plain(one) for one in chunks(server, asked)] for server in scripted)
    assert ours == theirs
    row, their = proxy.rows()[-1], direct.rows()[-1]
    assert (row.response_text, row.reasoning) == (their.response_text, their.reasoning)
    assert [call["function"] for call in row.tool_calls] == [call["function"] for call in their.tool_calls]
    assert list(row.completion_tokens) == list(their.completion_tokens)


def test_the_openai_client_hears_the_same_through_the_proxy(scripted):
    theirs, ours = (
        server.openai.chat.completions.create(model="fake", messages=HI, tools=[TOOL]) for server in scripted
    )
    assert plain(ours.model_dump()) == plain(theirs.model_dump())
    row = scripted[1].rows()[-1]
    assert [call["id"] for call in row.tool_calls] == [call.id for call in ours.choices[0].message.tool_calls or ()]


def test_the_upstreams_own_speculation_is_seen_through_the_proxy(scripted):
    direct, proxy = scripted
    whole(proxy, {"messages": HI})
    for name in ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total"):
        theirs = direct.metric(f"spec_decode_{name}", drafter="mtp")
        eventually(lambda: proxy.metric(f"spec_decode_{name}", drafter="upstream") == theirs > 0, 20)  # noqa: B023


def test_vllms_names_have_no_figures_of_an_engine_that_is_not_here(scripted):
    _, proxy = scripted
    text = proxy.http.get("/metrics").text
    assert 'vllm:num_requests_running{engine="0",model_name="fake"}' in text
    assert "vllm:kv_cache_usage_perc" not in text


def test_an_upstream_that_is_killed_is_heard_of(tmp_path):
    slow = json.dumps({"repeat": 1000, "pause": 0.01})
    with ExitStack() as stack:
        command = [sys.executable, "-m", "tests.fake_backend"]
        direct = stack.enter_context(running_process(command, tmp_path / "direct.db"))
        with proxied(direct.url, tmp_path) as proxy:
            stream = proxy.openai.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": slow}], stream=True
            )
            for _ in range(5):
                next(stream)
            direct.process.send_signal(signal.SIGKILL)
            with pytest.raises(openai.APIError, match="upstream"):
                list(stream)
            (row,) = proxy.rows()
            assert row.status == "failed"
            assert row.response_text.startswith("Hello wörld")
            assert len(row.completion_tokens) >= 4
