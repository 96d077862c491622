"""Ends that nobody waits for: clients that leave at any stage of a real generation, and a server told to stop."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from capture.records import Generation
from tests.answers import Answer, body, streamed, whole
from tests.checkpoints import random_endless
from tests.servers import CHAT, ProcessServer, eventually, running_process, serve_command

SAMPLED: dict[str, Any] = {"temperature": 1, "top_p": 1, "top_k": 0, "ignore_eos": True}
ENDLESS = 10_000  # tokens: minutes of decoding
LONG = "What is it? " * 3000  # some seconds of prefill


@pytest.fixture(scope="module")
def one_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessServer]:
    """A server that decodes one request at a time."""
    command = serve_command(random_endless(), "--max-num-seqs", "1")
    with running_process(command, tmp_path_factory.mktemp("ends") / "capture.db") as server:
        yield server


@contextmanager
def asking(server: ProcessServer, content: str = "Hi", **more: Any) -> Iterator[socket.socket]:
    """A raw connection with a request sent on it: closing it is leaving."""
    sent = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1000, **SAMPLED, **more})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
    address = urlsplit(server.url)
    with closing(socket.create_connection((address.hostname, address.port), timeout=60)) as connection:
        connection.sendall((head + sent).encode())
        yield connection


class Watch:
    """What a server has done since now."""

    def __init__(self, server: ProcessServer) -> None:
        self.server = server
        self._rows = len(server.rows())
        self._tokens = server.metric("generation_tokens_total")

    @property
    def tokens(self) -> float:
        return self.server.metric("generation_tokens_total") - self._tokens

    @property
    def rows(self) -> list[Generation]:
        return self.server.rows()[self._rows :]

    def row(self) -> Generation:
        """The one row that was added, as soon as it is there."""
        (row,) = eventually(lambda: self.rows)
        return row


def load(server: ProcessServer) -> tuple[float, float]:
    return server.metric("num_requests_running"), server.metric("num_requests_waiting")


def assert_at_rest(server: ProcessServer) -> None:
    """No place is taken, and nothing moves any more."""
    eventually(lambda: load(server) == (0, 0))
    assert server.metric("kv_cache_usage_ratio") == 0
    done = [
        server.metric("generation_tokens_total"),
        server.metric("spec_decode_num_drafts_total", drafter="mtp"),
    ]
    time.sleep(0.3)
    assert done == [
        server.metric("generation_tokens_total"),
        server.metric("spec_decode_num_drafts_total", drafter="mtp"),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_generation(one_place: ProcessServer, stream: bool) -> None:
    watch = Watch(one_place)
    with asking(one_place, stream=stream):
        eventually(lambda: watch.tokens >= 8)
        assert load(one_place) == (1, 0)
        at_leaving = watch.tokens
    row = watch.row()
    assert (row.status, row.finish_reason, row.error) == ("cancelled", None, None)
    assert_at_rest(one_place)
    assert watch.tokens == len(row.completion_tokens) == len(row.logprobs)
    assert at_leaving <= watch.tokens < at_leaving + 200, "it went on long after the client had left"
    assert row.response_text != ""
    assert row.request["stream"] == stream


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_a_long_prefill_ends_it(one_place: ProcessServer, stream: bool) -> None:
    watch = Watch(one_place)
    with asking(one_place, LONG, stream=stream):
        eventually(lambda: one_place.metric("kv_cache_usage_ratio") > 0)
    row = watch.row()
    assert row.status == "cancelled"
    assert (len(row.completion_tokens), row.response_text) == (0, "")
    assert 0 < row.timings["prompt_n"] < len(row.prompt_tokens) / 2
    assert_at_rest(one_place)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_all_its_choices(one_place: ProcessServer, stream: bool) -> None:
    watch = Watch(one_place)
    with asking(one_place, stream=stream, n=3):
        eventually(lambda: watch.tokens >= 8)
        assert load(one_place) == (1, 2)
    rows = eventually(lambda: len(watch.rows) == 3 and watch.rows)
    assert [row.status for row in rows] == ["cancelled"] * 3
    assert sum(len(row.completion_tokens) > 0 for row in rows) == 1
    assert_at_rest(one_place)


def test_a_client_that_leaves_before_its_prompt_is_tokenized_costs_no_prefill(one_place: ProcessServer) -> None:
    for _ in range(3):
        watch = Watch(one_place)
        with asking(one_place, LONG):
            pass
        row = watch.row()
        assert row.status == "cancelled"
        assert row.timings["prompt_n"] < len(row.prompt_tokens) / 2
    assert_at_rest(one_place)


def test_a_client_that_leaves_the_queue_gives_its_place_to_the_next(one_place: ProcessServer) -> None:
    watch = Watch(one_place)
    with ThreadPoolExecutor() as pool, asking(one_place, stream=True) as first:
        eventually(lambda: watch.tokens > 0)
        with asking(one_place, "Who is next?"):
            eventually(lambda: load(one_place) == (1, 1))
            last = pool.submit(whole, one_place.openai, "And last?", **SAMPLED, max_tokens=3)
            eventually(lambda: load(one_place) == (1, 2))
        left = watch.row()
        assert (left.status, len(left.completion_tokens)) == ("cancelled", 0)
        assert left.timings["prompt_n"] == 0
        assert load(one_place) == (1, 1)
        so_far = watch.tokens
        eventually(lambda: watch.tokens > so_far)
        assert not last.done()
        first.close()
        answer = last.result()
    assert answer.usage["completion_tokens"] == 3
    assert [row.status for row in watch.rows] == ["cancelled", "cancelled", "finished"]
    assert_at_rest(one_place)
    assert watch.tokens == sum(len(row.completion_tokens) for row in watch.rows)


@pytest.mark.parametrize("stream", [False, True])
def test_the_next_request_finds_nothing_of_one_that_was_left(one_place: ProcessServer, stream: bool) -> None:
    asked = {**SAMPLED, "seed": 3, "max_tokens": 12, "logprobs": True}
    before = whole(one_place.openai, "Hi", **asked)
    watch = Watch(one_place)
    with asking(one_place, "Hi", stream=stream, seed=3):
        eventually(lambda: watch.tokens >= 8)
    assert whole(one_place.openai, "Hi", **asked).said == before.said


def test_sigterm_lets_streams_finish_and_sends_new_ones_away(serve_model: Callable[..., ProcessServer]) -> None:
    server = serve_model(random_endless(), "--max-num-seqs", "3")
    tokens = 120
    manners = [streamed, streamed, whole, streamed]  # one more than there are places: it waits, and has its turn
    with ThreadPoolExecutor() as pool:
        answers = [
            pool.submit(ask, server.openai, f"What is {i}?", **SAMPLED, max_tokens=tokens, seed=i)
            for i, ask in enumerate(manners)
        ]
        eventually(lambda: load(server) == (3, 1) and server.metric("generation_tokens_total") > 10, 20)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.http.get("/ready").status_code == 503)
        for ask in (whole, streamed):
            with pytest.raises(openai.InternalServerError) as refused:
                ask(server.openai, "Am I late?", max_tokens=1)
            assert (refused.value.status_code, refused.value.code) == (503, "shutting_down")
            assert int(refused.value.response.headers["retry-after"]) > 0
        assert not all(answer.done() for answer in answers), "nothing ran any more when it was asked"
        told = [answer.result() for answer in answers]
    assert server.process.wait(20) == 0
    assert_told_and_kept(server, told, tokens)
    assert "Traceback" not in "".join(server.output)


def assert_told_and_kept(server: ProcessServer, told: list[Answer], tokens: int) -> None:
    """Every answer came to its end, and its row says the same."""
    rows = {row.id: row for row in server.rows()}
    assert rows.keys() == {answer.row_id for answer in told}
    for answer in told:
        row = rows[answer.row_id]
        assert (row.status, row.finish_reason) == ("finished", "length")
        assert answer.finish_reason == "length"
        assert answer.usage["completion_tokens"] == len(row.completion_tokens) == tokens
        assert row.response_text == answer.content


def test_what_outlasts_the_grace_becomes_cancelled_rows(serve_model: Callable[..., ProcessServer]) -> None:
    server = serve_model(random_endless(), "--max-num-seqs", "2", "--shutdown-grace", "0.5")
    seen: dict[str, str] = {}

    def read(content: str) -> str | None:
        """The code of the error that ends the stream; what came before it is in `seen`."""
        try:
            asked = body(content, **SAMPLED, max_tokens=ENDLESS)
            for chunk in server.openai.chat.completions.create(**asked, stream=True):
                (choice,) = chunk.choices
                assert choice.finish_reason is None
                row = chunk.id.removeprefix("chatcmpl-")
                seen[row] = seen.get(row, "") + (choice.delta.content or "")
        except openai.APIError as error:
            return error.code
        return "the stream just ended"

    def wait(content: str) -> str | None:
        with pytest.raises(openai.InternalServerError) as cut:
            whole(server.openai, content, **SAMPLED, max_tokens=ENDLESS)
        assert cut.value.status_code == 503
        return cut.value.code

    with ThreadPoolExecutor() as pool:
        running = [pool.submit(partial(ask, f"Go on {i}")) for i, ask in enumerate((read, wait))]
        eventually(lambda: load(server) == (2, 0), 20)
        waiting = pool.submit(wait, "Am I next?")
        eventually(lambda: load(server) == (2, 1) and server.metric("generation_tokens_total") > 10, 20)
        began = time.monotonic()
        assert server.stop() == 0
        assert 0.5 <= time.monotonic() - began < 15
        codes = [answer.result() for answer in (*running, waiting)]
    assert codes == ["shutting_down"] * 3
    rows = server.rows()
    assert [row.status for row in rows] == ["cancelled"] * 3
    assert sorted(len(row.completion_tokens) > 0 for row in rows) == [False, True, True]
    assert {row.id: row.response_text for row in rows if row.id in seen} == seen
    assert len(seen) == 1
    assert "Traceback" not in "".join(server.output)
