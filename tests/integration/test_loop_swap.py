"""A student swapped in over the API of a server process on the bundled model, while clients stream from it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import students
from tests.checkpoints import has_tiny, tiny
from tests.servers import CHAT, ProcessServer, eventually, running_process, serve_command

pytestmark = [pytest.mark.skipif(not has_tiny, reason="there is no bundled model"), pytest.mark.slow]
DRAFTERS, ACTIVE = "/v1/drafters", "/v1/drafters/active"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ProcessServer]:
    students.whole(tmp_path / "runs" / "whole", evaluation={"tau": 1.5})
    command = serve_command(tiny(), "--drafter-dir", str(tmp_path / "runs"))
    with running_process(command, tmp_path / "capture.db") as server:
        yield server


def body(at: int, **more: Any) -> dict[str, Any]:
    """The request number `at`: greedy or seeded, to be answered at length."""
    sampling = {"temperature": 0} if at % 2 else {"temperature": 0.8, "seed": at}
    content = f"Tell me about the number {at}."
    return {
        "messages": [{"role": "user", "content": content}],
        "ignore_eos": True,
        "logprobs": True,
        **sampling,
        **more,
    }


def tokens(choice: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(one["bytes"], one["logprob"]) for one in (choice.get("logprobs") or {}).get("content") or ()]


class Stream(threading.Thread):
    """One answer on its way, until it is told to stop; `said` are its tokens and their logprobs."""

    def __init__(self, server: ProcessServer, at: int) -> None:
        super().__init__()
        self.server, self.at, self.said, self.over = server, at, [], threading.Event()

    def run(self) -> None:
        asked = body(self.at, stream=True, max_tokens=1500)
        with self.server.http.stream("POST", CHAT, json=asked) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                self.said += tokens(json.loads(line[6:])["choices"][0])
                if self.over.is_set():
                    return


def test_clients_that_stream_do_not_notice_a_swap(server):
    streams = [Stream(server, at) for at in range(8)]
    for stream in streams:
        stream.start()
    eventually(lambda: all(stream.said for stream in streams))
    loaded = server.http.post(DRAFTERS, json={"path": "whole"})
    assert loaded.status_code == 201, loaded.text
    assert loaded.json()["evaluation"] == {"tau": 1.5}
    assert server.http.put(ACTIVE, json={"drafter": "whole", "canary": 0.5}).status_code == 200
    assert server.http.put(ACTIVE, json={"drafter": "whole"}).json()["active"] == "whole"
    assert all(stream.is_alive() for stream in streams)
    for stream in streams:
        stream.over.set()
    for stream in streams:
        stream.join(30)
    eventually(lambda: server.http.get("/v1/engine").json()["running"] == [])

    def again(at: int) -> list[tuple[Any, ...]]:
        answer = server.http.post(CHAT, json=body(at, max_tokens=len(streams[at].said)))
        assert answer.json()["timings"]["drafter"] == "whole"
        return tokens(answer.json()["choices"][0])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(again, range(8))) == [stream.said for stream in streams]
    prints = {one["name"]: one["fingerprint"] for one in server.http.get(DRAFTERS).json()["drafters"]}
    rows = eventually(lambda: len(found := server.rows()) == 16 and found)
    for name, some in (("mtp", rows[:8]), ("whole", rows[8:])):
        assert {(row.drafter, row.drafter_fingerprint) for row in some} == {(name, prints[name])}


def test_the_counters_of_a_drafter_are_its_rows_sums(server):
    server.http.post(DRAFTERS, json={"path": "whole", "name": "mine"})
    server.http.put(ACTIVE, json={"drafter": "mine"})
    for at in range(6):
        server.http.post(CHAT, json=body(at, max_tokens=50))
    rows = server.rows()
    told = next(one for one in server.http.get(DRAFTERS).json()["drafters"] if one["name"] == "mine")
    drafted = [step for row in rows for step in row.steps if step[0]]
    assert told["acceptance"] == {
        "drafts": len(drafted),
        "draft_tokens_per_pos": [sum(step[0] > slot for step in drafted) for slot in range(2)],
        "accepted_tokens_per_pos": [sum(step[1] > slot for step in drafted) for slot in range(2)],
    }
    assert server.metric("spec_decode_num_drafts_total", drafter="mine") == len(drafted)
    (steps,) = told["steps"]
    assert 0 < steps["steps"] == steps["sequences"] <= sum(len(row.steps) for row in rows)
    assert server.metric("drafter_state", drafter="mine", state="active") == 1


def test_a_server_told_to_stop_refuses_what_is_being_loaded_and_ends(server):
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(server.http.post, DRAFTERS, json={"path": "whole"})
        time.sleep(0.1)
        assert server.stop() == 0
        status = loading.result(20).status_code
    assert status in (201, 503)
