"""What a generation leaves in the capture file, and when: committed before the client sees the end (law L3)."""

from __future__ import annotations

import json
import threading
import time

import pytest

from tests.fake_backend import ACCEPTED, FINGERPRINTS, SLOTS, Script
from tests.servers import CHAT, Lock, eventually

ASK = {"messages": [{"role": "user", "content": "Hi"}]}


def test_the_row_holds_the_request_the_answer_and_how_it_was_made(serve):
    server = serve(Script(thought=(b"hm",)))
    asked = {**ASK, "seed": -1, "temperature": 0.5, "user": "me", "metadata": {"a": "b"}, "model": "fake"}
    answer = server.http.post(CHAT, json=asked, headers={"Authorization": "Bearer secret"}).json()
    (row,) = server.rows()
    assert answer["id"] == f"chatcmpl-{row.id}"
    assert row.id[14] == "7"
    assert (row.status, row.finish_reason, row.model, row.client) == ("finished", "stop", "fake", "me")
    assert row.request == asked
    assert "secret" not in repr(row)
    assert row.response_text == answer["choices"][0]["message"]["content"]
    assert row.reasoning == answer["choices"][0]["message"]["reasoning_content"] == "hm"
    assert row.prompt_tokens.tolist() == list(range(1, 8))
    assert row.completion_tokens.tolist() == list(range(100, 111))
    assert row.logprobs.tolist() == [-0.5 * (i + 1) for i in range(11)]
    assert row.steps == [(3, 2), (3, 0), (3, 3), (1, 1)]
    assert row.seed == 2**64 - 1
    assert row.parameters == {"temperature": 0.5}
    assert row.weights_fingerprint == FINGERPRINTS.weights
    assert row.tokenizer_fingerprint == FINGERPRINTS.tokenizer
    assert row.template_fingerprint == FINGERPRINTS.chat_template
    assert row.drafter_fingerprint == FINGERPRINTS.drafter
    assert row.split_key_length == 4
    assert row.timings == {**answer["timings"], "queue_ms": 3.0}


def test_a_streamed_answer_leaves_the_same_row_as_a_whole_one(serve):
    server = serve(Script(thought=(b"hm",)))
    server.chat()
    server.chat(stream=True)
    whole, streamed = server.rows()
    for name in ("status", "finish_reason", "response_text", "reasoning", "steps", "seed"):
        assert getattr(whole, name) == getattr(streamed, name)
    assert whole.completion_tokens.tolist() == streamed.completion_tokens.tolist()
    assert streamed.request["stream"] is True


def test_a_stream_does_not_end_before_its_row_is_committed(serve):
    server = serve(capture_commit_timeout=20)
    lock = Lock(server.capture)
    seen: list[str] = []
    ended = threading.Event()

    def read() -> None:
        with server.http.stream("POST", CHAT, json={**ASK, "stream": True}) as response:
            for line in response.iter_lines():
                seen.append(line)
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    eventually(lambda: any("bye" in line for line in seen))  # all of the text is there, only the end is not
    assert not ended.wait(0.7)
    assert not any('"finish_reason":"stop"' in line for line in seen)
    assert server.rows() == []
    lock.release()
    assert ended.wait(5)
    reader.join()
    assert any('"finish_reason":"stop"' in line for line in seen)
    assert len(server.rows()) == 1
    assert server.metric("capture_late_total") == 0


def test_a_whole_answer_does_not_leave_before_its_row_is_committed(serve):
    server = serve(capture_commit_timeout=20)
    lock = Lock(server.capture)
    threading.Timer(0.5, lock.release).start()
    began = time.monotonic()
    assert server.chat().status_code == 200
    assert time.monotonic() - began >= 0.5
    assert len(server.rows()) == 1


def test_an_answer_goes_out_late_rather_than_never(serve):
    server = serve(capture_commit_timeout=0.2)
    lock = Lock(server.capture)
    assert server.chat().status_code == 200
    ready = server.http.get("/ready")
    assert ready.status_code == 200
    assert (ready.json()["capture"], ready.json()["capture_late"]) == ("late", True)
    assert ready.json()["capture_queue_depth"] == 1
    assert server.metric("capture_late_total") == 1
    assert server.metric("capture_queue_depth") == 1
    assert server.metric("capture_generations_total", status="finished") == 0
    lock.release()
    eventually(lambda: server.http.get("/ready").json()["capture"] == "on")
    assert len(server.rows()) == 1
    assert server.metric("capture_late_total") == 1
    assert server.metric("capture_generations_total", status="finished") == 1


def test_a_row_that_cannot_be_written_fails_no_request(serve):
    server = serve()
    server.service.recorder.close(5)  # the writer is gone: every row is lost from here on
    assert server.chat().status_code == 200
    assert server.metric("capture_failures_total") == 1
    assert server.metric("capture_generations_total", status="finished") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_can_opt_out_by_header_or_by_body(serve, stream):
    server = serve()
    asked = {**ASK, "stream": stream}
    assert server.http.post(CHAT, json=asked, headers={"X-Draftloop-Capture": "off"}).status_code == 200
    assert server.http.post(CHAT, json={**asked, "store": False}).status_code == 200
    assert server.http.post(CHAT, json={**asked, "store": True}).status_code == 200
    assert server.http.post(CHAT, json=asked, headers={"X-Draftloop-Capture": "on"}).status_code == 200
    assert len(server.rows()) == 2
    assert server.metric("capture_generations_total", status="opted_out") == 2
    assert server.metric("capture_generations_total", status="finished") == 2


def test_an_opt_out_nobody_understands_is_refused_rather_than_captured(serve):
    server = serve()
    response = server.http.post(CHAT, json=ASK, headers={"X-Draftloop-Capture": "none"})
    assert response.status_code == 400
    assert "X-Draftloop-Capture" in response.json()["error"]["message"]
    assert server.rows() == []


def test_capture_can_be_off(serve):
    server = serve(capture="off")
    assert server.chat().status_code == 200
    assert server.http.get("/ready").json()["capture"] == "off"


def test_the_row_is_there_for_every_end_a_client_saw(serve):
    server = serve(Script(pause=0.005))
    answers = [server.openai.chat.completions.create(model="fake", **ASK, stream=True) for _ in range(5)]
    for stream in answers:
        *_, last = stream
        assert last.choices[0].finish_reason == "stop"
        assert last.id.removeprefix("chatcmpl-") in {row.id for row in server.rows()}


def test_the_timings_count_what_the_steps_say(serve):
    server = serve(Script(repeat=3))
    timings = json.loads(server.chat().text)["timings"]
    (row,) = server.rows()
    assert all(drafted <= SLOTS and accepted in ACCEPTED for drafted, accepted in row.steps)
    for slot in range(SLOTS):
        assert timings["draft_n_per_pos"][slot] == sum(drafted > slot for drafted, _ in row.steps)
        assert timings["draft_n_accepted_per_pos"][slot] == sum(accepted > slot for _, accepted in row.steps)
    assert timings["draft_n"] == sum(timings["draft_n_per_pos"])
    assert timings["draft_n_accepted"] == sum(timings["draft_n_accepted_per_pos"])
