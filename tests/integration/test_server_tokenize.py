"""/tokenize, /detokenize, /apply-template and /tokenizer_info, as clients of vLLM and of llama.cpp use them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checkpoints import tiny
from tests.fake_backend import Script
from tests.servers import MODEL, ProcessServer, eventually, running_app

MESSAGES = [{"role": "user", "content": "Why 🌍?"}]
TEXT = "<|im_start|>user\nGrüße, 🌍!<|im_end|>\n"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def post(server, path: str, **body: Any) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    with running_app(capture=tmp_path_factory.mktemp("tokenize") / "capture.db") as server:
        yield server


def test_vllms_clients_get_ids_their_count_and_the_models_limit(fake):
    assert post(fake, "/tokenize", model="fake", prompt="Hé", add_special_tokens=False) == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [72, 195, 169],
        "token_strs": None,
    }
    told = post(fake, "/tokenize", prompt="Hé", return_token_strs=True)
    assert told["token_strs"] == ["H", "\ufffd", "\ufffd"]


def test_llamas_clients_get_ids_or_pieces_bytes_where_a_token_is_no_text(fake):
    assert post(fake, "/tokenize", content="Hé", add_special=True, parse_special=True)["tokens"] == [72, 195, 169]
    assert post(fake, "/tokenize", content="Hé", with_pieces=True)["tokens"] == [
        {"id": 72, "piece": "H"},
        {"id": 195, "piece": [195]},
        {"id": 169, "piece": [169]},
    ]


def test_an_empty_text_has_no_tokens(fake):
    assert post(fake, "/tokenize", prompt="")["count"] == 0
    assert post(fake, "/tokenize", content="")["tokens"] == []
    assert post(fake, "/detokenize", tokens=[])["prompt"] == ""


def test_ids_are_text_again_by_both_names(fake):
    assert post(fake, "/detokenize", tokens=[72, 195, 169]) == {"prompt": "Hé", "content": "Hé"}
    assert post(fake, "/detokenize", tokens=[195])["content"] == "\ufffd"


def test_a_conversation_is_rendered_with_its_tools(fake):
    told = post(fake, "/apply-template", messages=MESSAGES, tools=[WEATHER])
    assert told == {"prompt": "<tool>weather<user>Why 🌍?"}
    assert post(fake, "/tokenize", messages=MESSAGES)["count"] == 7


def test_nothing_is_captured_of_it(fake):
    post(fake, "/tokenize", prompt="secret")
    assert fake.rows() == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "content"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ x }}"}, "chat_template"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special"),
        ("/tokenize", {"content": "a", "with_pieces": "yes"}, "with_pieces"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_what_is_wrong_is_named(fake, path, body, param):
    response = fake.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_another_model_is_not_found(fake):
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        response = fake.http.post(path, json={**body, "model": "other"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_the_backends_refusal_names_what_the_client_wrote(serve):
    server = serve(Script(refuses="No."))
    response = server.http.post("/tokenize", json={"messages": MESSAGES})
    assert (response.status_code, response.json()["error"]["message"]) == (400, "No.")


def test_nothing_is_told_before_the_model_is_loaded(serve):
    from tests.fake_backend import FakeBackend

    server = serve(backend=FakeBackend(start_delay=0.5), ready=False)
    for path in ("/tokenize", "/detokenize", "/apply-template"):
        assert server.http.post(path, json={"prompt": "a", "tokens": [], "messages": MESSAGES}).status_code == 503
    assert server.http.get("/tokenizer_info").status_code == 503
    eventually(lambda: server.http.get("/ready").status_code == 200)
    assert post(server, "/tokenize", prompt="a")["count"] == 1
    assert server.http.get("/tokenizer_info").status_code == 404, "the fake one says nothing of it"


def test_a_real_tokenizer_goes_both_ways(drafting: ProcessServer) -> None:
    told = post(drafting, "/tokenize", model=MODEL, prompt=TEXT, return_token_strs=True)
    assert told["tokens"] == list(tiny().tokenizer.encode_text(TEXT).ids)
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["token_strs"][0] == "<|im_start|>"
    assert told["max_model_len"] == drafting.http.get(f"/v1/models/{MODEL}").json()["max_model_len"]
    assert post(drafting, "/detokenize", tokens=told["tokens"])["prompt"] == TEXT
    pieces = post(drafting, "/tokenize", content=TEXT, with_pieces=True)["tokens"]
    assert [one["id"] for one in pieces] == told["tokens"]
    spelled = [one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in pieces]
    assert b"".join(spelled).decode() == TEXT
    response = drafting.http.post("/detokenize", json={"tokens": [10**7]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens")


def test_a_rendered_conversation_is_the_prompt_that_a_chat_has(drafting: ProcessServer) -> None:
    for more in ({}, {"chat_template_kwargs": {"enable_thinking": False}}, {"add_generation_prompt": False}):
        prompt = post(drafting, "/apply-template", messages=MESSAGES, **more)["prompt"]
        ids = post(drafting, "/tokenize", messages=MESSAGES, **more)["tokens"]
        kwargs = {name: value for name, value in more.items() if name == "add_generation_prompt"}
        expected = tiny().tokenizer.encode_chat(MESSAGES, {**kwargs, **more.get("chat_template_kwargs", {})})
        assert (prompt, ids) == (expected.text, list(expected.ids))
        assert post(drafting, "/tokenize", prompt=prompt)["tokens"] == ids


def test_an_evaluation_harness_finds_the_tokenizers_facts(drafting: ProcessServer) -> None:
    facts = drafting.http.get("/tokenizer_info").json()
    assert facts["chat_template"] == tiny().tokenizer.template
    assert facts["bos_token"] is None
    (end,) = post(drafting, "/tokenize", prompt=facts["eos_token"], add_special_tokens=False)["tokens"]
    assert end in tiny().tokenizer.eos_ids
