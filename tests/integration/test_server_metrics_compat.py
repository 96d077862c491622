"""--metrics-compat vllm: the names that vLLM's dashboards ask for, one by one, and the figures behind them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fake_backend import SLOTS, FakeBackend, Script
from tests.servers import eventually

# What vLLM's engine exposes, as far as this server counts it, and our name of it.
COUNTERS = {
    "vllm:num_preemptions_total": "num_preemptions_total",
    "vllm:prefix_cache_queries_total": "prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits_total",
    "vllm:prompt_tokens_total": "prompt_tokens_total",
    "vllm:generation_tokens_total": "generation_tokens_total",
}
GAUGES = {
    "vllm:num_requests_running": "num_requests_running",
    "vllm:num_requests_waiting": "num_requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage_ratio",
}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds": "inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds": "request_queue_time_seconds",
    "vllm:request_prefill_time_seconds": "request_prefill_time_seconds",
    "vllm:request_decode_time_seconds": "request_decode_time_seconds",
    "vllm:request_prompt_tokens": "request_prompt_tokens",
    "vllm:request_generation_tokens": "request_generation_tokens",
    "vllm:request_max_num_generation_tokens": "request_generation_tokens",
}
LABELS = {"model_name": "fake", "engine": "0"}


def theirs(server):
    """Every sample under vLLM's names, by name and further labels."""
    samples = [s for f in text_string_to_metric_families(server.http.get("/metrics").text) for s in f.samples]
    found = {}
    for sample in samples:
        if sample.name.startswith("vllm:"):
            assert LABELS.items() <= sample.labels.items()
            rest = {name: value for name, value in sample.labels.items() if name not in LABELS}
            key = sample.name, *sorted(rest.items())
            assert key not in found
            found[key] = sample.value
    return found


@pytest.fixture
def server(serve):
    running = serve(Script(repeat=2, cached=3), metrics_compat="vllm")
    for limit in (None, 7, 12):
        running.chat(max_tokens=limit)
    return running


def test_every_figure_stands_under_vllms_name_too(server):
    found = theirs(server)
    for name, ours in {**COUNTERS, **GAUGES}.items():
        assert found[(name,)] == server.metric(ours)
    for name, ours in HISTOGRAMS.items():
        assert found[(f"{name}_count",)] == server.metric(f"{ours}_count") > 0
        assert found[(f"{name}_sum",)] == pytest.approx(server.metric(f"{ours}_sum"))
        assert found[(f"{name}_bucket", ("le", "+Inf"))] == server.metric(f"{ours}_count")
    assert found["vllm:request_success_total", ("finished_reason", "stop")] == 1
    assert found["vllm:request_success_total", ("finished_reason", "length")] == 2
    assert found[("vllm:prompt_tokens_total",)] == 21


def test_a_cancelled_request_is_aborted_in_vllms_words(serve):
    server = serve(Script(repeat=100, pause=0.02), metrics_compat="vllm")
    with server.openai.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "Hi"}], stream=True
    ) as stream:
        next(stream)
    eventually(lambda: theirs(server).get(("vllm:request_success_total", ("finished_reason", "abort"))) == 1)


def test_what_drafters_count_apart_vllm_counts_together(serve):
    backend = FakeBackend(drafters=("mtp", "prediction"))
    server = serve(backend=backend, allow_drafter_choice=True, metrics_compat="vllm")
    for drafter in backend.drafters:
        server.chat(drafter=drafter)
    found = theirs(server)
    for name in ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total"):
        total = sum(server.metric(f"spec_decode_{name}", drafter=drafter) for drafter in backend.drafters)
        assert found[(f"vllm:spec_decode_{name}",)] == total > 0
    for slot in map(str, range(SLOTS)):
        ours = [
            server.metric("spec_decode_num_accepted_tokens_per_pos_total", drafter=drafter, position=slot)
            for drafter in backend.drafters
        ]
        assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", ("position", slot)] == sum(ours)


def test_vllms_names_are_absent_where_nobody_asked_for_them(serve):
    assert theirs(serve()) == {}


def test_there_are_none_before_the_model_is_loaded(serve):
    server = serve(backend=FakeBackend(start_delay=30), ready=False, metrics_compat="vllm")
    assert theirs(server) == {}
