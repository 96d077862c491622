"""An upstream's speculation counters, read from its metrics: added up over its engines, never twice, never invented."""

from __future__ import annotations

from serve.metrics_upstream import speculation_of_upstream


def read(text: str) -> dict[tuple[str, str | None], float]:
    """Each sample's value by name without prefix, and position."""
    samples = [sample for family in speculation_of_upstream(text) for sample in family.samples]
    assert {sample.labels["drafter"] for sample in samples} <= {"upstream"}
    return {
        (sample.name.removeprefix("draftloop_spec_decode_"), sample.labels.get("position")): sample.value
        for sample in samples
    }


def test_engines_and_models_of_one_upstream_add_up():
    names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")
    lines = [f'vllm:spec_decode_{name}{{engine="{e}",model_name="m"}} {4 - e}' for e in (0, 1) for name in names]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{e}",model_name="m",position="{p}"}} {3 - p}'
        for e in (0, 1)
        for p in (0, 1)
    ]
    assert read("\n".join(lines) + "\n") == {
        **{(name, None): 7 for name in names},
        ("num_accepted_tokens_per_pos_total", "0"): 6,
        ("num_accepted_tokens_per_pos_total", "1"): 4,
    }


def test_our_own_counters_are_those_of_all_its_drafters():
    text = """draftloop_spec_decode_num_draft_tokens_total{drafter="mtp"} 5
draftloop_spec_decode_num_draft_tokens_total{drafter="prediction"} 2
draftloop_spec_decode_num_draft_tokens_per_pos_total{drafter="mtp",position="0"} 3
"""
    assert read(text) == {("num_draft_tokens_total", None): 7, ("num_draft_tokens_per_pos_total", "0"): 3}


def test_a_count_told_under_two_names_counts_once():
    assert read("llamacpp:n_drafted_total 8\nllamacpp:n_draft_total 8\nllamacpp:n_accepted_total 5\n") == {
        ("num_draft_tokens_total", None): 8,
        ("num_accepted_tokens_total", None): 5,
    }


def test_another_draftloop_that_tells_vllms_names_too_counts_once():
    counts = [("num_drafts", "", 4), ("num_draft_tokens", "", 8), ("num_accepted_tokens", "", 5)]
    counts += [("num_accepted_tokens_per_pos", f'{{position="{p}"}}', 3 - p) for p in (0, 1)]
    lines = [
        f"{prefix}spec_decode_{name}_total{labels} {count}"
        for name, labels, count in counts
        for prefix in ("draftloop_", "vllm:")
    ]
    assert read("\n".join(lines) + "\n") == {
        ("num_drafts_total", None): 4,
        ("num_draft_tokens_total", None): 8,
        ("num_accepted_tokens_total", None): 5,
        ("num_accepted_tokens_per_pos_total", "0"): 3,
        ("num_accepted_tokens_per_pos_total", "1"): 2,
    }


def test_what_is_not_told_is_absent():
    assert read("") == {}
    assert read("vllm:num_requests_running 3\nvllm:spec_decode_num_drafts_created 1\n") == {}
    assert read('vllm:spec_decode_num_accepted_tokens_per_pos_total{position="x"} 1\n') == {}
    assert read("<html>not { metrics") == {}


def test_what_counts_nothing_is_absent():
    for value in ("NaN", "+Inf", "-Inf", "-1"):
        assert read(f"vllm:spec_decode_num_drafts_total {value}\n") == {}
        assert read(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {value}\n') == {}
    assert read('vllm:spec_decode_num_accepted_tokens_per_pos_total{position="999999999999"} 1\n') == {}
