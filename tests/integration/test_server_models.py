"""GET /v1/models and /v1/models/{id}: one model, its names, its limits and what it does by default."""

from __future__ import annotations

import openai
import pytest

from tests.fake_backend import FakeBackend
from tests.servers import MODEL, ProcessServer

HI = [{"role": "user", "content": "Hi"}]


def test_a_model_is_listed_under_each_of_its_names(serve):
    server = serve(served_model_name="org/mine, gpt-4o,mine")
    listed = list(server.openai.models.list())
    assert [model.id for model in listed] == ["org/mine", "gpt-4o", "mine"]
    assert {model.model_extra["root"] for model in listed} == {"org/mine"}
    assert {model.object for model in listed} == {"model"}
    assert {model.model_extra["max_model_len"] for model in listed} == {4096}


def test_requests_may_say_any_name_and_answers_say_the_first(serve):
    server = serve(served_model_name="org/mine,gpt-4o")
    for name in ("org/mine", "gpt-4o"):
        assert server.openai.models.retrieve(name).id == name
        assert server.openai.chat.completions.create(model=name, messages=HI).model == "org/mine"
        assert server.openai.completions.create(model=name, prompt="Hi").model == "org/mine"
        assert server.http.post("/tokenize", json={"model": name, "prompt": "a"}).status_code == 200
    assert {row.model for row in server.rows()} == {"org/mine"}


@pytest.mark.parametrize("names", [None, "org/mine,gpt-4o"])
def test_no_other_name_will_do(serve, names):
    server = serve(**({} if names is None else {"served_model_name": names}))
    with pytest.raises(openai.NotFoundError) as missing:
        server.openai.models.retrieve("other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        server.openai.completions.create(model="other", prompt="Hi")


def test_without_a_name_the_model_is_called_what_the_backend_calls_it(serve):
    server = serve()
    assert [model.id for model in server.openai.models.list()] == ["fake"]
    assert server.openai.models.retrieve("fake").model_extra["root"] == "fake"


def test_models_are_told_only_once_one_is_loaded(serve):
    server = serve(backend=FakeBackend(start_delay=0.5), ready=False)
    assert server.http.get("/v1/models").status_code == 503


def test_it_tells_what_a_request_that_says_nothing_gets(drafting: ProcessServer) -> None:
    told = drafting.openai.models.retrieve(MODEL).model_extra["default_sampling_params"]
    assert told.keys() == {"thinking", "non_thinking"}
    for mode, thinks in (("thinking", True), ("non_thinking", False)):
        answer = drafting.openai.chat.completions.create(
            model=MODEL,
            messages=HI,
            max_tokens=1,
            extra_body={"chat_template_kwargs": {"enable_thinking": thinks}},
        )
        (row,) = [row for row in drafting.rows() if row.id == answer.id.removeprefix("chatcmpl-")]
        assert {name: row.parameters[name] for name in told[mode]} == told[mode]
