"""Raw prompts on a real engine: likelihoods as transformers has them, and as an evaluation harness asks for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from capture.store import Store
from tests import reference
from tests.checkpoints import random_small
from tests.servers import ProcessServer, running_process, serve_command

PATH = "/v1/completions"
TEXTS = ("def reverse(text):\n    return", "The quick brown fox", "a", "for i in range(10):\n" * 12)
HARNESS: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessServer]:
    command = serve_command(random_small(), "--dtype", "float32", "--draft-tokens", "3", "--max-model-len", "400")
    with running_process(command, tmp_path_factory.mktemp("completions") / "capture.db") as running:
        yield running


@pytest.fixture(scope="module")
def oracle() -> Any:
    return reference.trunk(random_small().directory)


def ask(server: ProcessServer, prompt: Any, **more: Any) -> dict[str, Any]:
    response = server.http.post(PATH, json={"prompt": prompt, **more})
    assert response.status_code == 200, response.text
    return dict(response.json())


def encoded(text: str) -> list[int]:
    return list(random_small().tokenizer.encode_text(text).ids)


def parsed(answer: dict[str, Any], contexts: list[int]) -> list[tuple[float, bool]]:
    """What the harness makes of an answer: (log-likelihood of the continuation, would greedy decoding say it)."""
    found = []
    for choice, context in zip(answer["choices"], contexts, strict=True):
        told = choice["logprobs"]
        logprobs, tops = told["token_logprobs"][context:-1], told["top_logprobs"][context:-1]
        greedy = all(one == max(top.values()) for one, top in zip(logprobs, tops, strict=True))
        found.append((sum(logprobs), greedy))
    return found


@torch.no_grad()
def likely(oracle: Any, ids: list[int], context: int) -> tuple[float, bool]:
    logprobs = torch.log_softmax(reference.logits(oracle, ids), -1)
    rows = [(at - 1, ids[at]) for at in range(context, len(ids))]
    return sum(float(logprobs[row, token]) for row, token in rows), all(
        int(logprobs[row].argmax()) == token for row, token in rows
    )


def test_a_harness_gets_the_likelihoods_that_transformers_gives(server: ProcessServer, oracle: Any) -> None:
    pairs = [(encoded(text), encoded(" " + other)) for text in TEXTS for other in ("None", "x = 3")]
    for first, _ in pairs[:2]:
        pairs.append((first, reference.greedy(oracle, first, 4)))  # what greedy decoding says
    prompts = [first + second for first, second in pairs]
    contexts = [len(first) for first, _ in pairs]
    told = parsed(ask(server, prompts, **HARNESS), contexts)
    expected = [likely(oracle, prompt, context) for prompt, context in zip(prompts, contexts, strict=True)]
    assert [greedy for _, greedy in told] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in told} == {True, False}
    for (one, _), (other, _), context, prompt in zip(told, expected, contexts, prompts, strict=True):
        assert one == pytest.approx(other, abs=1e-4 * (len(prompt) - context))


def test_nothing_need_be_said_to_be_told_of_a_prompt(server: ProcessServer) -> None:
    prompt = encoded(TEXTS[3])
    one = ask(server, [prompt], **HARNESS)["choices"][0]["logprobs"]
    none = ask(server, [prompt], **{**HARNESS, "max_tokens": 0})
    assert none["choices"][0]["logprobs"] == {name: values[:-1] for name, values in one.items()}
    assert none["choices"][0]["finish_reason"] == "length"
    assert none["usage"]["completion_tokens"] == 0
    assert len(one["tokens"]) == len(prompt) + 1


def test_a_text_is_its_tokens_special_ones_meant(server: ProcessServer) -> None:
    text = "<|im_start|>user\nWhy?<|im_end|>\n<think>"
    ids = encoded(text)
    assert random_small().tokenizer.literal_id("<|im_start|>") == ids[0]
    by_text, by_ids = (ask(server, prompt, **HARNESS)["choices"][0] for prompt in (text, ids))
    assert by_text == by_ids
    assert by_text["logprobs"]["tokens"][0] == "<|im_start|>"
    assert by_text["text"].startswith(text)


@pytest.mark.parametrize("more", [{}, {"echo": True, "logprobs": 2}, {"n": 2, "logprobs": 0}], ids=str)
def test_a_stream_says_what_the_whole_says(server: ProcessServer, more: dict[str, Any]) -> None:
    asked = {"max_tokens": 40, "temperature": 1, "top_p": 1, "top_k": 0, "seed": 8, **more}
    one = ask(server, [TEXTS[0], TEXTS[3]], **asked)["choices"]
    client, model = server.openai, "under-test"
    parts = client.completions.create(model=model, prompt=[TEXTS[0], TEXTS[3]], stream=True, **_own(asked))
    told: dict[int, list[Any]] = {}
    for part in parts:
        for choice in part.choices:
            told.setdefault(choice.index, []).append(choice)
    for choice in one:
        pieces = told[choice["index"]]
        assert "".join(piece.text for piece in pieces) == choice["text"]
        assert pieces[-1].finish_reason == choice["finish_reason"]
        for name, values in (choice["logprobs"] or {}).items():
            assert [value for piece in pieces if piece.logprobs for value in getattr(piece.logprobs, name)] == values
    assert len({choice["text"] for choice in one}) == len(one), "each choice its own"


def _own(asked: dict[str, Any]) -> dict[str, Any]:
    """Arguments for the official client, which does not know all of ours."""
    return {
        **{name: value for name, value in asked.items() if name != "top_k"},
        "extra_body": {"top_k": asked["top_k"]},
    }


def test_likelihoods_are_the_same_bits_in_any_company(drafting: ProcessServer, plain: ProcessServer) -> None:
    prompts = [TEXTS[3], *TEXTS]
    asked = {"echo": True, "logprobs": 3, "temperature": 0, "max_tokens": 5}
    alone = [ask(plain, prompt, **asked)["choices"][0] for prompt in prompts]
    ask(drafting, TEXTS[3], max_tokens=5)  # its beginning is known now
    together = ask(drafting, prompts, **asked)["choices"]
    assert [_said(choice) for choice in together] == [_said(choice) for choice in alone]
    assert ask(drafting, TEXTS[3], **asked)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert ask(drafting, TEXTS[3], max_tokens=5)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def _said(choice: dict[str, Any]) -> tuple[Any, ...]:
    return choice["text"], choice["logprobs"], choice["finish_reason"]


def test_ranks_agree_with_likelihoods(server: ProcessServer) -> None:
    (choice,) = ask(server, TEXTS[0], prompt_logprobs=4, max_tokens=0)["choices"]
    ids = encoded(TEXTS[0])
    assert choice["prompt_logprobs"][0] is None
    for token, told in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True):
        own = told[str(token)]
        others = sorted((one for name, one in told.items() if name != str(token)), key=lambda one: one["rank"])
        assert [one["logprob"] for one in others] == sorted((one["logprob"] for one in others), reverse=True)
        assert sorted({one["rank"] for one in told.values()} | {own["rank"]})[:4] == [1, 2, 3, 4]
        assert len(told) == (4 if own["rank"] <= 4 else 5)


def test_a_chats_rendered_prompt_completed_is_the_chats_answer(drafting: ProcessServer) -> None:
    messages = [{"role": "user", "content": "What is <think>?"}]
    sampled = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "presence_penalty": 0, "seed": 3, "max_tokens": 48}
    asked = {"messages": messages, "chat_template_kwargs": {"enable_thinking": True}}
    chat = drafting.http.post("/v1/chat/completions", json={**asked, **sampled, "return_token_ids": True}).json()
    # The client's own "<think>" is text to a chat and would be a token to a raw prompt: only the ids are the same.
    ids = drafting.http.post("/tokenize", json=asked).json()["tokens"]
    assert ids == chat["prompt_token_ids"]
    raw = ask(drafting, ids, **sampled, return_token_ids=True)["choices"][0]
    assert raw["token_ids"] == chat["choices"][0]["token_ids"]
    message = chat["choices"][0]["message"]
    said = (message.get("reasoning_content") or "") + (message["content"] or "")
    assert said.replace("\n", "") == raw["text"].replace("</think>", "", 1).replace("\n", "")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt": "x " * 600}, "prompt"),
        ({"prompt": ["x", "x " * 600], "n": 2}, "prompt[1]"),
        ({"prompt": [[1], [2], [10**6]]}, "prompt[2]"),
        ({"prompt": "x " * 100, "max_tokens": 390}, "max_tokens"),
        ({"prompt": [1, 2, 10**6]}, "prompt"),
        ({"prompt": "x", "logit_bias": {"1000000": 1}}, "logit_bias"),
    ],
    ids=["too-long", "one-too-long", "one-unknown", "no-room", "no-such-token", "no-such-bias"],
)
def test_what_the_model_cannot_take_is_refused(server: ProcessServer, asked: dict[str, Any], param: str) -> None:
    response = server.http.post(PATH, json=asked)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_prompt_may_fill_the_context_where_nothing_is_to_be_said(server: ProcessServer) -> None:
    ids = encoded("x") * 400
    (choice,) = ask(server, [ids], **{**HARNESS, "max_tokens": 0})["choices"]
    assert len(choice["logprobs"]["tokens"]) == 400
    assert server.http.post(PATH, json={"prompt": [ids], "max_tokens": 1}).status_code == 400


def test_the_answer_may_be_held_to_a_grammar(server: ProcessServer) -> None:
    (choice,) = ask(server, "Pick: ", structured_outputs={"choice": ["yes", "no"]}, max_tokens=20)["choices"]
    assert choice["text"] in ("yes", "no")


def test_the_row_is_the_prompt_and_the_answer(server: ProcessServer) -> None:
    answer = ask(server, TEXTS[1], echo=True, max_tokens=12, temperature=1, ignore_eos=True)
    assert server.capture is not None
    with Store.open(server.capture) as store:
        row = store.get(answer["id"].removeprefix("cmpl-"))
    assert row.prompt_tokens is not None
    assert row.completion_tokens is not None
    assert row.logprobs is not None
    assert row.prompt_tokens.tolist() == encoded(TEXTS[1])
    assert answer["choices"][0]["text"] == TEXTS[1] + row.response_text
    assert (len(row.completion_tokens), len(row.logprobs), row.split_key_length) == (12, 12, 0)
    assert not any(math.isnan(logprob) for logprob in row.logprobs)
    again = ask(server, row.prompt_tokens.tolist(), seed=row.seed, max_tokens=12, temperature=1, ignore_eos=True)
    assert again["choices"][0]["text"] == row.response_text
