"""/metrics and /version against counts made by hand from the answers' timings."""

from __future__ import annotations

import pytest

from tests.fake_backend import FINGERPRINTS, SLOTS, FakeBackend, Script


def test_the_counters_equal_the_sum_of_the_timings(serve):
    server = serve(Script(repeat=2))
    answers = [server.chat(max_tokens=limit).json() for limit in (None, 7, 12)]
    timings = [answer["timings"] for answer in answers]

    def total(name: str) -> int:
        return sum(timing[name] for timing in timings)

    drafter = {"drafter": "mtp"}
    assert server.metric("spec_decode_num_draft_tokens_total", **drafter) == total("draft_n") > 0
    assert server.metric("spec_decode_num_accepted_tokens_total", **drafter) == total("draft_n_accepted") > 0
    steps = [step for row in server.rows() for step in row.steps]
    assert server.metric("spec_decode_num_drafts_total", **drafter) == sum(drafted > 0 for drafted, _ in steps)
    for slot in range(SLOTS):
        labels = {**drafter, "position": str(slot)}
        proposed, accepted = (
            sum(timing[name][slot] for timing in timings if slot < len(timing[name]))
            for name in ("draft_n_per_pos", "draft_n_accepted_per_pos")
        )
        assert server.metric("spec_decode_num_draft_tokens_per_pos_total", **labels) == proposed
        assert server.metric("spec_decode_num_accepted_tokens_per_pos_total", **labels) == accepted
        assert server.metric("spec_decode_acceptance_ratio", **labels) == pytest.approx(accepted / proposed)
    assert server.metric("prompt_tokens_total") == total("prompt_n") == 21
    assert server.metric("generation_tokens_total") == total("predicted_n") == 39
    assert server.metric("request_success_total", finished_reason="stop") == 1
    assert server.metric("request_success_total", finished_reason="length") == 2
    assert server.metric("capture_generations_total", status="finished") == 3
    assert server.metric("capture_commit_seconds_count") == 3
    for histogram in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert server.metric(f"{histogram}_count") == 3
    assert server.metric("request_queue_time_seconds_sum") == pytest.approx(0.009)
    # Every token but the first of each answer comes some time after another.
    assert server.metric("inter_token_latency_seconds_count") == 36


def test_running_requests_and_the_cache_are_gauges(serve):
    server = serve(Script(repeat=100, pause=0.02))
    with server.http.stream(
        "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    ):
        assert server.metric("num_requests_running") == 1
        assert server.metric("num_requests_waiting") == 0
        assert server.metric("kv_cache_usage_ratio") == 0.25


def test_every_drafter_counts_apart(serve):
    server = serve(backend=FakeBackend(drafters=("mtp", "prediction")), allow_drafter_choice=True)
    timings = {
        name: [server.chat(drafter=name, max_tokens=limit).json()["timings"] for limit in limits]
        for name, limits in {"mtp": (10,), "prediction": (5, 7)}.items()
    }
    for name, blocks in timings.items():
        for slot in range(SLOTS):
            labels = {"drafter": name, "position": str(slot)}
            proposed = sum(block["draft_n_per_pos"][slot] for block in blocks if slot < len(block["draft_n_per_pos"]))
            accepted = sum(
                block["draft_n_accepted_per_pos"][slot] for block in blocks if slot < len(block["draft_n_per_pos"])
            )
            assert server.metric("spec_decode_num_draft_tokens_per_pos_total", **labels) == proposed > 0
            assert server.metric("spec_decode_num_accepted_tokens_per_pos_total", **labels) == accepted
            assert server.metric("spec_decode_acceptance_ratio", **labels) == pytest.approx(accepted / proposed)
        total = sum(block["draft_n"] for block in blocks)
        assert server.metric("spec_decode_num_draft_tokens_total", drafter=name) == total
    assert server.metric("spec_decode_num_drafts_total", drafter="mtp") == 3


def test_the_prefix_cache_preemptions_and_the_draft_length_are_told(serve):
    server = serve(Script(cached=5))
    server.chat()
    server.chat()
    assert server.metric("prefix_cache_queries_total") == 14
    assert server.metric("prefix_cache_hits_total") == 10
    assert server.metric("num_preemptions_total") == 2
    assert server.metric("spec_decode_draft_length") == SLOTS


def test_latencies_measure_the_wait(serve):
    server = serve(Script(first_pause=0.2, pieces=(b"a", b"b"), pause=0.1))
    server.chat()
    assert 0.3 <= server.metric("time_to_first_token_seconds_sum") < 1
    assert 0.1 <= server.metric("inter_token_latency_seconds_sum") < 0.5
    assert 0.4 <= server.metric("e2e_request_latency_seconds_sum") < 1.5


def test_a_slot_that_was_never_proposed_has_no_ratio(serve):
    server = serve()
    text = server.http.get("/metrics").text
    assert "draftloop_spec_decode_num_draft_tokens_per_pos_total{" in text
    assert "draftloop_spec_decode_acceptance_ratio{" not in text


def test_only_our_own_names_are_exposed(serve):
    response = serve().http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {line.split("{")[0].split(" ")[0] for line in response.text.split("\n") if line and line[0] != "#"}
    assert all(name.startswith("draftloop_") for name in names)
    assert not any(name.endswith("_created") for name in names)


def test_two_apps_in_one_process_count_apart(serve, tmp_path):
    first, second = serve(), serve(capture=tmp_path / "other.db")
    first.chat()
    assert first.metric("generation_tokens_total") == 10
    assert second.metric("generation_tokens_total") == 0


def test_the_version_names_everything_an_answer_depends_on(serve):
    told = serve().http.get("/version").json()
    assert told["fingerprints"] == {
        "weights": FINGERPRINTS.weights,
        "tokenizer": FINGERPRINTS.tokenizer,
        "chat_template": FINGERPRINTS.chat_template,
        "drafter": FINGERPRINTS.drafter,
        "build": "fake",
    }
    assert (told["model"], told["drafter"], told["draft_tokens"]) == ("fake", "mtp", SLOTS)
    assert (told["build"], told["probe"]) == ({"torch": "none"}, {"rows": 2})


def test_the_fingerprint_does_not_depend_on_the_drafter(serve, tmp_path, monkeypatch):
    import tests.fake_backend as fake

    first = serve().http.get("/version").json()["system_fingerprint"]
    changed = {"weights": "x" * 64, "drafter": "y" * 64}
    seen = {}
    for name, value in changed.items():
        prints = fake.FINGERPRINTS.__class__(**{**fake.FINGERPRINTS.__dict__, name: value})
        monkeypatch.setattr(fake, "FINGERPRINTS", prints)
        server = serve(backend=FakeBackend(), capture=tmp_path / f"{name}.db")
        seen[name] = server.http.get("/version").json()["system_fingerprint"]
        monkeypatch.undo()
    assert seen["drafter"] == first
    assert seen["weights"] != first
