"""The live page in a real browser: what a person sees and can do there. Without a Chromium these are skipped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from backend.interface import EngineStats
from tests import browser
from tests.browser import Browser, Page
from tests.fake_backend import SLOTS, FakeBackend, Script
from tests.servers import Server, eventually

READY = "document.querySelector('#state').textContent === 'ready'"
ANSWERED = "document.querySelector('.said.answer:last-child .summary')"
HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>\u202e</div></html>"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = browser.found()
    if path is None:
        pytest.skip(f"no browser here: none of {', '.join(browser.NAMES)} is on the PATH (apt-get install chromium)")
    with browser.running_browser(path, tmp_path_factory.mktemp("browser") / "profile") as running:
        yield running


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second is long for a test."""
    monkeypatch.setattr("serve.live.EVERY", 0.15)


@pytest.fixture
def look(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Open a server's page in a tab of its own: `look(server, **how)`; nothing may be said against any in the end."""
    with ExitStack() as stack:
        opened: list[tuple[Page, str]] = []

        def open_page(server: Server, ready: str = READY, **how: Any) -> Page:
            page = stack.enter_context(chromium.page(**how))
            page.open(server.url)
            opened.append((page, server.url))
            page.until(ready)
            return page

        yield open_page
        for page, url in opened:
            assert page.complaints == []
            assert page.do("document.title") == "draftloop"
            origins = {urlsplit(asked)[:2] for asked in page.requests if not asked.startswith("data:")}
            assert origins == {urlsplit(url)[:2]}


def figures(page: Page) -> dict[str, str]:
    told: dict[str, str] = page.do(
        "Object.fromEntries([...document.querySelectorAll('[data-figure]')]"
        ".map(n => [n.dataset.figure, n.textContent]))"
    )
    return told


def table(page: Page, name: str) -> dict[str, list[str]]:
    """A table's rows by their names, without what each begins with."""
    told: dict[str, list[str]] = page.do(
        f"Object.fromEntries([...document.querySelectorAll('#{name} [data-row]')]"
        ".map(r => [r.dataset.row, [...r.cells].slice(1).map(c => c.textContent)]))"
    )
    return told


def ask(page: Page, question: str = "Hi") -> None:
    """Ask in the chat box and wait for the answer's end."""
    before = page.do("document.querySelectorAll('.said.answer').length")
    page.write("#question", question)
    page.click("#send")
    page.until(f"document.querySelectorAll('.said.answer').length === {before + 1}")
    page.until(ANSWERED)


def tokens(page: Page) -> list[list[str]]:
    """The last answer's tokens: text, classes, title."""
    told: list[list[str]] = page.do(
        "[...document.querySelectorAll('.said.answer:last-child .token')]"
        ".map(t => [t.textContent, [...t.classList].slice(1).join(' '), t.title])"
    )
    return told


def slots(page: Page) -> list[list[Any]]:
    """A line each: drafter, slot, acceptance and counts of the last minute, the same since start, the bar's width."""
    told: list[list[Any]] = page.do(
        "[...document.querySelectorAll('.slot')].map(s => [s.dataset.drafter, s.dataset.slot,"
        " ...[2, 3].flatMap(at => [...s.children[at].children].map(c => c.textContent)),"
        " parseFloat(s.querySelector('.bar').style.width)])"
    )
    return told


def percent(part: float, whole: float) -> list[str]:
    return [f"{100 * part / whole:.1f} %", f"{part:,.0f} / {whole:,.0f}"]


# -- figures ---------------------------------------------------------------------------------------------------------


def test_at_rest_every_number_is_that_of_metrics(serve, look):
    server = serve(Script(repeat=2, cached=5), backend=None)
    for limit in (None, 7, 12):
        server.chat(max_tokens=limit)
    server.chat(store=False)
    page = look(server)
    page.until("document.querySelector('#requests [data-row=generated]')?.cells[1].textContent === '59'")

    told, of = figures(page), {"drafter": "mtp"}
    proposed, accepted = (
        [
            server.metric(f"spec_decode_num_{name}_tokens_per_pos_total", **of, position=str(slot))
            for slot in range(SLOTS)
        ]
        for name in ("draft", "accepted")
    )
    tau = f"{1 + sum(accepted) / server.metric('spec_decode_num_drafts_total', **of):.2f}"
    assert told["model"] == "fake"
    assert told["length"] == tau
    assert told["draft-tokens"] == f"{server.metric('spec_decode_draft_length'):.0f}"
    assert told["running"] == f"{server.metric('num_requests_running'):.0f}" == "0"
    assert told["waiting"] == f"{server.metric('num_requests_waiting'):.0f}" == "0"
    assert told["cache-usage"] == f"{100 * server.metric('kv_cache_usage_ratio'):.1f} %" == "25.0 %"
    hits, queries = server.metric("prefix_cache_hits_total"), server.metric("prefix_cache_queries_total")
    assert told["cache-hits"] == f"{100 * hits / queries:.1f} %"
    assert told["cache-counts"] == f"prefix cache: {hits:.0f} / {queries:.0f}"

    ratio = [server.metric("spec_decode_acceptance_ratio", **of, position=str(slot)) for slot in range(SLOTS)]
    assert slots(page) == [
        ["mtp", str(slot), *percent(a, p), *percent(a, p), pytest.approx(100 * ratio[slot], abs=0.01)]
        for slot, (p, a) in enumerate(zip(proposed, accepted, strict=True))
    ]
    assert table(page, "requests") == {
        "stop": [f"{server.metric('request_success_total', finished_reason='stop'):.0f}"],
        "length": [f"{server.metric('request_success_total', finished_reason='length'):.0f}"],
        "prompt-tokens": [f"{server.metric('prompt_tokens_total'):.0f}"],
        "generated": [f"{server.metric('generation_tokens_total'):.0f}"],
        "preemptions": [f"{server.metric('num_preemptions_total'):.0f}"],
    }
    assert table(page, "capture") == {
        **{
            status: [f"{server.metric('capture_generations_total', status=status):.0f}"]
            for status in ("finished", "cancelled", "failed", "opted_out")
        },
        "queue": [f"{server.metric('capture_queue_depth'):.0f}"],
        "late": [f"{server.metric('capture_late_total'):.0f}"],
        "lost": [f"{server.metric('capture_failures_total'):.0f}"],
    }
    assert table(page, "drafters") == {"mtp": [tau, tau, f"{sum(accepted):.0f} / {sum(proposed):.0f}", "d" * 12]}
    latency = table(page, "latency")
    for name, metric in (
        ("time_to_first_token", "time_to_first_token"),
        ("inter_token", "inter_token_latency"),
        ("end_to_end", "e2e_request_latency"),
    ):
        assert latency[name][3] == f"{server.metric(f'{metric}_seconds_count'):.0f}"
        assert all(text.endswith(("ms", "s")) for text in latency[name][:3])


def test_lines_are_drawn_as_time_goes_by(serve, look):
    server = serve(Script(repeat=300, pause=0.01))
    page = look(server)
    before = page.do("document.querySelectorAll('#acceptance svg').length")
    assert before == 0  # nothing has been drafted
    page.write("#question", "Hi")
    page.click("#send")
    page.until(f"document.querySelectorAll('#acceptance polyline').length === {SLOTS}")
    count = "document.querySelector('#acceptance polyline').getAttribute('points').split(' ').length"
    first = page.do(count)
    page.until(f"{count} > {first + 3}")
    titles = page.do("[...document.querySelectorAll('.chart svg')].map(s => s.getAttribute('aria-label'))")
    assert titles == ["Acceptance over time: mtp", "Tokens per second", "Requests and K", "τ over time"]
    page.until("document.querySelector('[data-figure=running]').textContent === '1'")
    page.click("#stop")


def test_a_page_opened_later_shows_what_was_before(serve, look):
    server = serve()
    server.chat()
    time.sleep(1)
    page = look(server)
    assert page.do("document.querySelector('#acceptance polyline').getAttribute('points').split(' ').length") > 3


def test_two_drafters_have_their_own_slots_lines_and_rows(serve, look):
    server = serve(backend=FakeBackend(drafters=("mtp", "prediction")), allow_drafter_choice=True)
    server.chat(max_tokens=10)
    server.chat(drafter="prediction", max_tokens=5)
    page = look(server)
    page.until(f"document.querySelectorAll('.slot').length === {2 * SLOTS}")
    assert page.do("[...document.querySelectorAll('#slots h3')].map(h => h.textContent)") == ["mtp", "prediction"]
    assert list(table(page, "drafters")) == ["mtp", "prediction"]
    assert page.do("document.querySelectorAll('#acceptance svg').length") == 2


@pytest.mark.slow
def test_a_server_that_says_nothing_is_not_taken_for_one_at_rest(serve, look, monkeypatch):
    server = serve()
    page = look(server)
    monkeypatch.setattr(server.backend, "engine", lambda: 1 / 0)
    page.until("document.querySelector('#state').textContent.startsWith('nothing heard for')")
    monkeypatch.undo()
    page.until(READY)


def test_a_server_that_is_gone_is_said_to_be(serve_process, look):
    server = serve_process()
    page = look(server)
    server.process.kill()
    page.until("document.querySelector('#state').textContent === 'no connection'")
    page.complaints.clear()  # the browser's own


# -- the chat box ----------------------------------------------------------------------------------------------------


def test_an_answer_shows_which_tokens_were_drafted_and_accepted(serve, look):
    server = serve(Script(repeat=2))
    page = look(server)
    ask(page)
    said = tokens(page)
    assert "".join(text for text, _, _ in said) == "Hello wörld 🌍!\nbye" * 2
    expected = ["own"]
    for drafted, accepted in server.rows()[0].steps:
        expected += [f"drafted slot-{slot}" for slot in range(accepted)]
        expected += ["own rejected" if accepted < drafted else "own"]
    assert [classes for _, classes, _ in said] == expected[: len(said)]
    assert said[0][2].startswith("from the prompt")
    assert said[1][2] == "slot 0 of 3, drafted by mtp, accepted"
    timings = server.rows()[0].timings
    summary = page.do("document.querySelector('.summary').textContent")
    assert summary.startswith("Ended by stop")
    for slot, (p, a) in enumerate(zip(timings["draft_n_per_pos"], timings["draft_n_accepted_per_pos"], strict=True)):
        assert f"slot {slot}: {a} / {p} ({100 * a / p:.1f} %)" in summary


def test_a_conversation_goes_on_and_begins_anew(serve, look):
    server = serve(Script(pieces=(b"Yes",)))
    page = look(server)
    ask(page, "One?")
    ask(page, "Two?")
    page.click("#clear")
    ask(page, "Three?")
    said = [[message["content"] for message in request.messages] for request in server.backend.requests]
    assert said == [["One?"], ["One?", "Yes", "Two?"], ["Three?"]]
    assert page.do("document.querySelectorAll('.said').length") == 2


def test_what_is_asked_for_is_what_is_sent(serve, look):
    server = serve(Script(repeat=9))
    page = look(server)
    page.do("document.querySelector('#temperature').value = '0.3'; document.querySelector('#most').value = '17'; 0")
    page.click("#private")
    ask(page)
    (request,) = server.backend.requests
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.3, 17)
    assert server.rows() == []
    assert len(tokens(page)) == 17


def test_return_sends_and_shift_return_does_not(serve, look):
    server = serve(Script(pieces=(b"Yes",)))
    page = look(server)
    page.write("#question", "One")
    key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
    page.send("Input.dispatchKeyEvent", type="keyDown", modifiers=8, **key)
    page.send("Input.insertText", text="line")
    page.send("Input.dispatchKeyEvent", type="keyDown", **key)
    page.until(ANSWERED)
    assert server.backend.requests[0].messages[0]["content"] == "One\nline"


def test_an_answer_can_be_stopped(serve, look):
    server = serve(Script(repeat=500, pause=0.02))
    page = look(server)
    page.write("#question", "Hi")
    page.click("#send")
    page.until("document.querySelectorAll('.token').length > 5")
    assert page.do("document.querySelector('#send').disabled")
    page.click("#stop")
    page.until(f"{ANSWERED}?.textContent === 'Stopped.'")
    eventually(lambda: [row.status for row in server.rows()] == ["cancelled"])
    assert not page.do("document.querySelector('#send').disabled")


def test_what_the_server_refuses_or_fails_at_is_said(serve, look):
    server = serve(Script(refuses="Too long, by far."))
    page = look(server)
    ask(page)
    assert page.do("document.querySelector('.error.summary').textContent") == "Too long, by far."
    (complaint,) = page.complaints  # the browser's own, of a 400
    assert "400" in complaint
    page.complaints.clear()


def test_an_answer_that_breaks_off_says_so(serve, look, tmp_path):
    server = serve(Script(breaks_after=3), capture=tmp_path / "broken.db")
    page = look(server)
    ask(page)
    assert "its log says more" in page.do("document.querySelector('.error.summary').textContent")
    assert len(tokens(page)) > 1


def test_before_an_upstream_an_answer_is_plain_text(serve, look):
    class Upstreams(FakeBackend):
        def stats(self) -> EngineStats:
            return replace(super().stats(), kv_cache_usage=None, drafters=())

    server = serve(backend=Upstreams())
    page = look(server)
    assert (figures(page)["draft-tokens"], figures(page)["cache-usage"], figures(page)["running"]) == ("–", "–", "0")
    assert page.do("document.querySelector('#tokens-note').hidden")
    ask(page)
    assert page.do("document.querySelector('.said.answer').firstChild.textContent") == "Hel"
    assert tokens(page) == []
    sent = server.rows()[0].request
    assert sent.keys() == {"messages", "stream", "temperature", "max_tokens"}  # another server may know no more


# -- keys ------------------------------------------------------------------------------------------------------------


def test_where_a_key_is_needed_the_page_asks_for_it_and_keeps_it_in_its_tab(serve, look):
    server = serve(Script(pieces=(b"Yes",)), api_key="alice=first-key")
    page = look(server, ready="!document.querySelector('#key').hidden")
    assert figures(page)["running"] == "–"
    for key, after in (("wrong", "!document.querySelector('#key-wrong').hidden"), ("first-key", READY)):
        page.write("#key-value", key)
        page.click("#key button")
        page.until(after)
    assert page.do("document.querySelector('#key').hidden")
    ask(page)
    assert server.rows()[0].client == "alice"
    page.open(server.url)
    page.until(READY)  # without being asked again
    assert page.do("localStorage.length + document.cookie.length") == 0
    assert not any("first-key" in url for url in page.requests)
    assert all("401" in complaint for complaint in page.complaints)
    page.complaints.clear()


def test_open_figures_beside_a_guarded_api_ask_for_a_key_with_the_first_question(serve, look):
    server = serve(Script(pieces=(b"Yes",)), api_key="alice=first-key", metrics_auth="off")
    page = look(server)
    assert page.do("document.querySelector('#key').hidden")
    page.write("#question", "Hi")
    page.click("#send")
    page.until("!document.querySelector('#key').hidden")
    page.write("#key-value", "first-key")
    page.click("#key button")
    page.until(ANSWERED)
    assert "".join(text for text, _, _ in tokens(page)) == "Yes"
    page.complaints.clear()


# -- promote and roll back -------------------------------------------------------------------------------------------

BUTTONS = "[...document.querySelectorAll('#promotion button')].map(b => b.textContent).join()"
DEFAULT = "[...document.querySelectorAll('#drafters [data-row]')].map(r => r.cells[0].textContent).join()"
COLOURS = """Object.fromEntries([...document.querySelectorAll('#charts [aria-label="τ over time"] ~ .legend span')]
    .map(s => [s.textContent, s.className]))"""


def test_the_operator_promotes_a_drafter_and_takes_it_back(serve, look):
    server = serve(backend=FakeBackend(drafters=("mtp", "prediction")))
    page = look(server, width=390, height=800, mobile=True)
    page.until(f"{BUTTONS} === 'Promote prediction,Promote none'")
    assert page.do(DEFAULT) == "mtp (active),prediction"
    server.chat()
    page.until(f"{COLOURS}.mtp")
    colour = page.do(COLOURS)["mtp"]
    page.click("#promotion [data-drafter=prediction]")
    page.until(f"{BUTTONS} === 'Promote mtp,Promote none,Roll back to mtp'")
    assert page.do(DEFAULT) == "prediction (active),mtp (previous)"
    server.chat()
    assert server.rows()[-1].drafter == "prediction"
    page.until(f"{COLOURS}.prediction")
    assert page.do(COLOURS)["mtp"] == colour != page.do(COLOURS)["prediction"]
    assert page.do("document.documentElement.scrollWidth") <= 390
    page.click("#promotion [data-action=rollback]")
    page.until(f"{BUTTONS} === 'Promote prediction,Promote none'")
    assert page.do("document.querySelector('#admin-key').hidden")


def test_the_operators_key_is_asked_for_and_what_is_refused_is_said(serve, look):
    server = serve(backend=FakeBackend(drafters=("mtp", HOSTILE)), admin_key="root=the-operators")
    page = look(server)
    page.until(f"{BUTTONS}.includes('Promote none')")
    page.click("#promotion [data-drafter=none]")
    for key, after in (
        ("wrong", "document.querySelector('#promotion-error').textContent.includes('API key is needed')"),
        ("the-operators", f"{BUTTONS}.includes('Roll back to mtp')"),
    ):
        page.until("!document.querySelector('#admin-key').hidden")
        page.write("#admin-key-value", key)
        page.click("#admin-key button")
        page.until(after)
    assert page.do("document.querySelector('#admin-key').hidden && document.querySelector('#promotion-error').hidden")
    assert server.backend.info().drafter == "none"
    assert page.do(DEFAULT) == f"none (active),mtp (previous),{HOSTILE}"
    page.do("document.querySelectorAll('#promotion button')[1].click(); 0")
    page.until(f"{BUTTONS}.includes('Roll back to none')")
    page.until("!document.querySelector('#promotion [data-action=rollback]').disabled")  # the last answer has come
    assert server.backend.info().drafter == HOSTILE
    page.do(
        "fetch = (path, how) => Promise.resolve(new Response(JSON.stringify({error: {message: '<b>no</b>'}}), "
        "{status: 400})); document.querySelector('#promotion [data-action=rollback]').click(); 0"
    )
    page.until("document.querySelector('#promotion-error').textContent === '<b>no</b>'")
    assert page.do("localStorage.length + document.cookie.length") == 0
    page.complaints.clear()  # the browser's own, of the keys


# -- how it looks ----------------------------------------------------------------------------------------------------


def lightness(page: Page, what: str) -> float:
    """Of a computed colour, 0 … 255."""
    colour = page.do(f"getComputedStyle(document.body).{what}")
    return sum(int(part) for part in colour.partition("(")[2].rstrip(")").split(",")[:3]) / 3


def test_it_is_light_or_dark_as_the_reader_likes(serve, look):
    server = serve()
    light, dark = look(server), look(server, dark=True)
    assert lightness(light, "backgroundColor") > 200 > 100 > lightness(light, "color")
    assert lightness(dark, "backgroundColor") < 60 < 160 < lightness(dark, "color")


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_it_fits_every_width(serve, look, width):
    drafters = ("mtp", "prediction", "x" * 80)
    server = serve(
        Script(pieces=(b"word " * 20, b"y" * 500, HOSTILE.encode())),
        backend=None if width == 390 else FakeBackend(Script(pieces=(b"y" * 500,)), drafters=drafters),
        served_model_name="m" * 300,
    )
    server.chat()
    page = look(server, width=width, height=800, mobile=width < 500)
    ask(page, "z" * 400)
    assert page.do("document.documentElement.scrollWidth") <= width
    # Nothing sticks out of its card, but what can be scrolled there.
    wide = page.do(
        "[...document.querySelectorAll('.card *, .tile *')].filter(e => !e.closest('.scroll, svg, .hidden') &&"
        " e.getBoundingClientRect().right > e.closest('.card, .tile').getBoundingClientRect().right)"
        ".map(e => e.tagName + e.id + '.' + e.className)"
    )
    assert wide == []
    if width < 500:
        cards = page.do("[...document.querySelectorAll('.card:not(#key)')].map(c => c.getBoundingClientRect().width)")
        assert min(cards) > 0.9 * width


# -- what others wrote -----------------------------------------------------------------------------------------------


def test_hostile_text_is_text(serve, look):
    backend = FakeBackend(
        Script(thought=(HOSTILE.encode(),), pieces=(HOSTILE.encode(), b" </div>", b"&amp;")), drafters=(HOSTILE,)
    )
    server = serve(backend=backend, served_model_name=HOSTILE)
    page = look(server)
    ask(page, HOSTILE)
    assert figures(page)["model"] == HOSTILE
    assert "".join(text for text, _, _ in tokens(page)) == HOSTILE * 2 + " </div>&amp;"
    assert page.do("document.querySelector('.said.user').textContent") == HOSTILE
    page.until("document.querySelector('#slots h3')")
    assert page.do("document.querySelector('#slots h3').textContent") == HOSTILE
    assert list(table(page, "drafters")) == [HOSTILE]
    assert page.do("document.querySelector('.token.drafted').title").endswith(f"drafted by {HOSTILE}, accepted")
    assert page.do("document.querySelectorAll('img, script:not([src]), iframe').length") == 0
    assert page.do("document.querySelectorAll('script').length") == 1


def test_a_refusal_in_hostile_words_is_text(serve, look):
    server = serve(Script(refuses=HOSTILE))
    page = look(server)
    ask(page)
    assert page.do("document.querySelector('.error.summary').textContent") == HOSTILE
    assert page.do("document.querySelectorAll('img').length") == 0
    page.complaints.clear()  # of the 400


def test_scripts_that_got_in_all_the_same_would_not_run(serve, look):
    page = look(serve())
    page.do(f"document.body.insertAdjacentHTML('beforeend', {json.dumps(HOSTILE)}); 0")
    page.do(
        "const s = document.createElement('script'); s.textContent = 'document.title = 1'; document.body.append(s); 0"
    )
    page.do("fetch('http://127.0.0.1:9/').catch(() => 0)")
    page.until("document.images[0].complete")
    time.sleep(0.3)
    assert page.do("document.title") == "draftloop"
    assert len([complaint for complaint in page.complaints if "Content Security Policy" in complaint]) >= 3
    page.complaints.clear()


# -- a real engine ---------------------------------------------------------------------------------------------------


def test_before_a_real_engine_page_metrics_and_rows_say_the_same(look, drafting, tmp_path: Path):
    drafting.chat("What is a list?", max_tokens=40)
    page = look(drafting)
    page.do("document.querySelector('#temperature').value = '0'; 0")
    ask(page, "Write a function that reverses a string.")
    row = drafting.rows()[-1]
    said = tokens(page)
    assert len(said) == len(row.completion_tokens)
    assert "".join(text for text, _, _ in said).removesuffix("<|im_end|>") == row.response_text
    accepted = sum("drafted" in classes for _, classes, _ in said)
    assert accepted == sum(a for _, a in row.steps) > 0

    total = f"{drafting.metric('generation_tokens_total'):,.0f}"
    page.until(f"document.querySelector('#requests [data-row=generated]').cells[1].textContent === '{total}'")
    counts = [
        [
            drafting.metric(f"spec_decode_num_{name}_tokens_per_pos_total", drafter="mtp", position=str(slot))
            for name in ("accepted", "draft")
        ]
        for slot in range(4)
    ]
    assert [line[4:6] for line in slots(page)[:4]] == [percent(a, p) for a, p in counts]
    fingerprint = drafting.http.get("/version").json()["fingerprints"]["drafter"]
    assert table(page, "drafters")["mtp"][3] == fingerprint[:12]
