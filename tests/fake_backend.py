"""A ChatBackend that recites a script, for tests of the wire. Knows no model.

Run as `python -m tests.fake_backend FLAGS` it is `serve` over this backend, in a process of its own.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from backend.default_drafter import DefaultDrafter
from backend.interface import (
    Alternative,
    BackendError,
    BackendUnavailable,
    ChatEvent,
    ChatRequest,
    DrafterStats,
    EngineStats,
    Fingerprints,
    InvalidRequest,
    ModelInfo,
    Result,
    SamplingRequest,
    Step,
    StepTimes,
    Timings,
    TokenInfo,
    ToolCall,
    ToolCallDelta,
)

SLOTS = 3
PROMPT = tuple(range(1, 8))
ACCEPTED = (2, 0, 3, 1)  # drafts accepted by one verify step after the other
FINGERPRINTS = Fingerprints(
    weights="w" * 64, tokenizer="t" * 64, chat_template="c" * 64, drafter="d" * 64, build="fake"
)


def fingerprint(drafter: str) -> str:
    """Each has its own, as real ones have."""
    known = {"none": "none", "mtp": FINGERPRINTS.drafter}
    return known.get(drafter) or hashlib.sha256(drafter.encode()).hexdigest()


PROCESSORS = (
    "choice",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "grammar",
)


@dataclass(frozen=True)
class Script:
    """What the backend says and does. A user message that is a JSON object overrides these fields."""

    pieces: tuple[bytes, ...] = (
        b"Hel",
        b"lo ",
        b"w\xc3",
        b"\xb6r",
        b"ld",
        b" \xf0\x9f",
        b"\x8c\x8d",
        b"!",
        b"\n",
        b"bye",
    )
    thought: tuple[bytes, ...] = ()  # reasoning tokens before the pieces
    # Calls after the pieces, each (name, piece of its arguments, ...), a token an item: made where the request has
    # tools, may call them (only once, perhaps), and does not bring a call's result.
    calls: tuple[tuple[str, ...], ...] = ()
    by_choice: tuple[Mapping[str, Any], ...] = ()  # what choice i does otherwise
    repeat: int = 1  # how often the pieces are said
    pause: float = 0.0  # seconds before each event
    first_pause: float = 0.0  # seconds before the first
    finish: Literal["stop", "length", "error"] = "stop"
    breaks_after: int | None = None  # events until the backend raises a bug of its own
    refuses: str | None = None
    refuses_grammar: str | None = None
    deaf: float = 0.0  # seconds until the backend knows the request's id
    cached: int = 0  # of the seven prompt tokens, those from the prefix cache


@dataclass
class FakeBackend:
    """`cancelled` and `requests` list what it was told; `start_delay` and `start_error` say how it loads.

    `drafters` are those that may be named, first the default at its start; `steps` are those that each took part in.
    """

    script: Script = field(default_factory=Script)
    start_delay: float = 0.0
    start_error: str | None = None
    alive: bool = True
    requests: list[ChatRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    drafters: tuple[str, ...] = ("mtp",)
    steps: dict[str, list[Step]] = field(default_factory=dict)
    looked_up: int = 0  # prompt tokens
    found: int = 0
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    started: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        self.default = DefaultDrafter(self.drafters[0])
        self.came: set[str] = set()  # drafters that were loaded over the API

    async def start(self) -> None:
        await asyncio.sleep(self.start_delay)
        if self.start_error:
            raise BackendError(self.start_error)
        self.started = True

    async def close(self) -> None:
        self.closed = True

    def ready(self) -> bool:
        return self.started and self.alive

    def failed(self) -> bool:
        return not self.alive

    def info(self) -> ModelInfo:
        if not self.started:
            raise BackendUnavailable("still loading")
        prints = replace(FINGERPRINTS, drafter=fingerprint(self.default.name))
        return ModelInfo("fake", 4096, self.default.name, SLOTS, prints, {"torch": "none"}, {"rows": 2})

    def stats(self) -> EngineStats:
        if not self.started:
            raise BackendUnavailable("still loading")
        return EngineStats(
            running=len(self.running),
            waiting=0,
            kv_cache_usage=0.25,
            prefix_cache_queries=self.looked_up,
            prefix_cache_hits=self.found,
            preemptions=2,
            draft_tokens=SLOTS,
            drafters=tuple(map(self._drafter_stats, sorted(self.drafters, key=self.default.name.__ne__))),
            drafter_states=self._states(),
            canary_share=self.default.canary.share if self.default.canary else 0.0,
            step_times={name: self._times(name) for name in self._states()},
        )

    def _drafter_stats(self, drafter: str) -> DrafterStats:
        steps = self.steps.get(drafter, [])
        proposed = tuple(sum(step.drafted > slot for step in steps) for slot in range(SLOTS))
        accepted = tuple(sum(step.accepted > slot for step in steps) for slot in range(SLOTS))
        drafts = sum(step.drafted > 0 for step in steps)
        return DrafterStats(drafter, drafts, proposed, accepted, proposed, accepted)

    def engine(self) -> Mapping[str, Any]:
        return {
            "running": list(self.running),
            "waiting": [],
            "draft_tokens": SLOTS,
            "drafters": {name: fingerprint(name) for name in self.drafters if name != "none"},
            "drafter_states": self._states(),
            "default_drafters": self.default.as_json(),
            "canary": asdict(self.default.canary) if self.default.canary else None,
        }

    def _states(self) -> dict[str, str]:
        return {name: self.default.state(name) or "loaded" for name in dict.fromkeys((*self.drafters, "none"))}

    def _times(self, drafter: str) -> tuple[StepTimes, ...]:
        """Of a millisecond each, and every sequence alone."""
        steps = self.steps.get(drafter, [])
        return (StepTimes(1, len(steps), len(steps), sum(step.accepted for step in steps), 1e-3 * len(steps)),)

    def _entry(self, drafter: str) -> dict[str, Any]:
        stats = self._drafter_stats(drafter)
        return {
            "name": drafter,
            "kind": drafter if drafter in ("mtp", "prediction", "none") else "student",
            "fingerprint": fingerprint(drafter),
            "state": self._states()[drafter],
            "loaded_at": 1.0,
            "parameters_read": 1000,
            "evaluation": None,
            "acceptance": {
                "drafts": stats.drafts,
                "draft_tokens_per_pos": stats.draft_tokens_per_pos,
                "accepted_tokens_per_pos": stats.accepted_tokens_per_pos,
            },
            "steps": [asdict(one) for one in self._times(drafter)],
        }

    def list_drafters(self) -> Mapping[str, Any]:
        return {
            "active": self.default.name,
            "previous": self.default.previous,
            "canary": asdict(self.default.canary) if self.default.canary else None,
            "drafters": [self._entry(name) for name in self._states()],
            "history": self.default.as_json(),
        }

    async def load_drafter(self, path: str, name: str | None, min_acceptance: float) -> Mapping[str, Any]:
        """Whatever the path; it is called by its last part."""
        await asyncio.sleep(self.script.pause)
        name = name or path.rpartition("/")[2]
        if name in self._states():
            raise InvalidRequest(f"There is a drafter {name!r} already.", param="name", code="name_taken")
        self.drafters = (*self.drafters, name)
        self.came.add(name)
        tried = {
            "drafter": name,
            "steps": 10,
            "drafts": 10,
            "draft_tokens_per_pos": [10] * SLOTS,
            "accepted_tokens_per_pos": [5, 3, 2],
            "acceptance": 0.5,
            "acceptance_length": 2.0,
        }
        trial = {"prompts": 1, "min_acceptance": min_acceptance, "candidate": tried, "active": tried}
        return {**self._entry(name), "trial": trial}

    async def unload_drafter(self, name: str) -> None:
        if self._states()[name] in ("active", "canary") or name == "none":
            raise InvalidRequest(f"{name!r} cannot be unloaded.", param="drafter", code="drafter_in_use")
        if name not in self.came:
            raise InvalidRequest(f"The server was started with {name!r}.", param="drafter", code="drafter_of_start")
        self.came.remove(name)
        self.default.forget(name)
        self.drafters = tuple(one for one in self.drafters if one != name)

    def promote(self, drafter: str, canary: float | None = None) -> None:
        if drafter not in self._states():
            raise InvalidRequest(f"No drafter {drafter!r} is loaded.", param="drafter")
        if canary is None:
            self.default.promote(drafter)
        else:
            self.default.begin_canary(drafter, canary)

    def roll_back(self) -> None:
        self.default.roll_back()

    def cancel(self, request_id: str) -> None:
        if request_id in self.running:
            self.cancelled.append(request_id)
            self.running[request_id].set()

    async def tokenize(self, request: ChatRequest) -> tuple[tuple[int, ...], str]:
        await asyncio.sleep(0)
        script = _script(request, self.script)
        if script.refuses:
            raise InvalidRequest(script.refuses, param="messages", code="context_length_exceeded")
        match request.prompt:
            case None:
                said = [f"<{message['role']}>{message['content'] or ''}" for message in request.messages]
                return PROMPT, "".join([*(f"<tool>{tool['function']['name']}" for tool in request.tools), *said])
            case str(text):
                return tuple(text.encode()), text
            case ids:
                return ids, b"".join(await self.detokenize(ids)).decode("utf-8", "replace")

    async def detokenize(self, ids: Sequence[int]) -> Sequence[bytes]:
        """Of a raw prompt a token is a byte."""
        if wrong := [token for token in ids if not 0 <= token < 256]:
            raise InvalidRequest(f"There is no token {wrong[0]}.", param="tokens")
        return [bytes([token]) for token in ids]

    async def chat(self, request: ChatRequest) -> AsyncIterator[ChatEvent]:
        self.requests.append(request)
        script = _script(request, self.script)
        if script.refuses:
            raise InvalidRequest(script.refuses, param="messages", code="context_length_exceeded")
        drafter = request.drafter or self.default.of(request.id)
        if drafter not in self._states():
            raise InvalidRequest(f"No drafter {drafter!r} is loaded.", param="drafter")
        if script.refuses_grammar and request.sampling.grammar:
            raise InvalidRequest(script.refuses_grammar, param="response_format")
        await asyncio.sleep(script.deaf)
        self.looked_up += len(PROMPT)
        self.found += script.cached
        stop = self.running[request.id] = asyncio.Event()
        try:
            prompt, _ = await self.tokenize(request)
            recital = _Recital(request, prompt, script, drafter, self.steps.setdefault(drafter, []))
            await _pause(stop, script.first_pause)
            scored = recital.prompt_tokens()
            for at in range(0, len(scored), 4):
                yield ChatEvent(prompt_tokens=scored[at : at + 4])
            while True:
                await _pause(stop, script.pause)
                event = recital.next(cancelled=stop.is_set())
                yield event
                if event.result is not None:
                    return
        finally:
            del self.running[request.id]


@dataclass(frozen=True)
class _Word:
    """One token of a script: what it says where, and of a call its index, and its name or more arguments."""

    data: bytes
    kind: Literal["reasoning", "content", "call"]
    call: int = 0
    names: bool = False


class _Recital:
    """One script on its way: tokens in blocks as a speculating engine emits them."""

    def __init__(
        self, request: ChatRequest, prompt: tuple[int, ...], script: Script, drafter: str, all_steps: list[Step]
    ) -> None:
        self.request, self.prompt, self.script = request, prompt, script
        self.drafter, self.all_steps = drafter, all_steps
        words = [_Word(data, "reasoning") for data in script.thought]
        words += [_Word(data, "content") for data in script.pieces * script.repeat]
        for index, call in enumerate(_calls(request, script)):
            words += [_Word(text.encode(), "call", index, names=not at) for at, text in enumerate(call)]
        limit = request.sampling.max_tokens
        self.todo = words[:limit]
        self.finish = "length" if limit is not None and limit < len(words) else script.finish
        self.done: list[TokenInfo] = []
        self.steps: list[Step] = []
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.text = {"reasoning": "", "content": ""}
        self.calls: list[ToolCall] = []
        self.events = 0

    def next(self, *, cancelled: bool) -> ChatEvent:
        self.events += 1
        if self.script.breaks_after is not None and self.events > self.script.breaks_after:
            raise RuntimeError("the engine tripped over its own feet")
        if cancelled:
            return ChatEvent(result=self._result("cancelled"))
        if not self.todo:
            return ChatEvent(result=self._result(self.finish))
        count, step = 1, None
        if self.done:
            drafted = min(SLOTS, len(self.todo) - 1)
            accepted = min(drafted, ACCEPTED[len(self.steps) % len(ACCEPTED)])
            step = Step(drafted, accepted)
            self.steps.append(step)
            self.all_steps.append(step)
            count = accepted + 1
        new = {"reasoning": "", "content": ""}
        deltas = []
        tokens = []
        for index in range(len(self.done), len(self.done) + count):
            word = self.todo.pop(0)
            tokens.append(replace(self._token(index, word.data), part=word.kind))
            if word.kind == "call":
                deltas.append(self._call(word))
            else:
                new[word.kind] += self.decode(word.data)
        if not self.todo:
            new["content"] += self.decode(b"", True)
        self.done += tokens
        self.text = {kind: self.text[kind] + new[kind] for kind in self.text}
        result = None if self.todo else self._result(self.finish)
        more: dict[str, Any] = {} if step is None else {"step": step, "drafted_by": self.drafter}
        return ChatEvent(**new, tool_calls=tuple(deltas), tokens=tuple(tokens), result=result, **more)

    def _call(self, word: _Word) -> ToolCallDelta:
        text = word.data.decode()
        if word.names:
            self.calls.append(ToolCall(f"call_{word.call}", text, ""))
            return ToolCallDelta(word.call, id=self.calls[-1].id, name=text)
        self.calls[-1] = replace(self.calls[-1], arguments=self.calls[-1].arguments + text)
        return ToolCallDelta(word.call, text)

    def _token(self, index: int, data: bytes) -> TokenInfo:
        wanted = range(self.request.sampling.top_logprobs)
        others = tuple(Alternative(i, f"alt{i}", f"alt{i}".encode(), -float(i) or float("-inf")) for i in wanted)
        return TokenInfo(100 + index, data.decode("utf-8", "replace"), data, -0.5 * (index + 1), others)

    def prompt_tokens(self) -> tuple[TokenInfo, ...]:
        if (wanted := self.request.sampling.prompt_logprobs) is None:
            return ()
        others = tuple(Alternative(i, f"alt{i}", f"alt{i}".encode(), -float(i)) for i in range(wanted))
        spelled = [bytes([token % 256]) for token in self.prompt]
        return tuple(
            TokenInfo(
                token, data.decode("utf-8", "replace"), data, -0.25 * at or float("nan"), others if at else (), at
            )
            for at, (token, data) in enumerate(zip(self.prompt, spelled, strict=True))
        )

    def _result(self, finish: str) -> Result:
        sampling, predicted = self.request.sampling, self.request.prediction
        drafted, accepted = (sum(getattr(step, name) for step in self.steps) for name in ("drafted", "accepted"))
        return Result(
            finish_reason=finish,  # type: ignore[arg-type]
            prompt_ids=self.prompt,
            completion_ids=tuple(token.token_id for token in self.done),
            logprobs=tuple(token.logprob for token in self.done),
            seed=sampling.seed if sampling.seed is not None else 42,
            sampling=_effective(sampling),
            drafter=self.drafter,
            steps=tuple(self.steps),
            fingerprints=replace(FINGERPRINTS, drafter=fingerprint(self.drafter)),
            timings=Timings(
                queue_ms=3.0,
                prompt_n=len(self.prompt) - self.script.cached,
                prompt_ms=10.0,
                predicted_n=len(self.done),
                predicted_ms=50.0,
            ),
            content=self.text["content"],
            reasoning=self.text["reasoning"],
            tool_calls=tuple(self.calls),
            error="out of memory" if finish == "error" else None,
            first_user_end=4 if self.request.prompt is None else 0,
            reasoning_tokens=min(len(self.script.thought), len(self.done)) or None,
            cached_tokens=self.script.cached,
            accepted_prediction_tokens=None if predicted is None else accepted,
            rejected_prediction_tokens=None if predicted is None else drafted - accepted,
        )


def _effective(asked: SamplingRequest) -> dict[str, Any]:
    """The temperature, and of everything that came with batching what differs from asking for nothing."""
    nothing = SamplingRequest()
    more = {name: asdict(asked)[name] for name in PROCESSORS if getattr(asked, name) != getattr(nothing, name)}
    return {"temperature": 1.0 if asked.temperature is None else asked.temperature, **more}


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    if seconds:
        try:
            await asyncio.wait_for(stop.wait(), seconds)
        except TimeoutError:
            return
    else:
        await asyncio.sleep(0)


def _calls(request: ChatRequest, script: Script) -> tuple[tuple[str, ...], ...]:
    answered = request.messages and request.messages[-1]["role"] == "tool"
    if not request.tools or request.tool_choice == "none" or answered:
        return ()
    return script.calls if request.parallel_tool_calls else script.calls[:1]


def _script(request: ChatRequest, default: Script) -> Script:
    content = request.prompt
    if content is None and request.messages[-1]["role"] == "user":
        content = request.messages[-1]["content"]
    script = replace(default, **json.loads(content)) if isinstance(content, str) and content[:1] == "{" else default
    choice = request.sampling.choice
    return replace(script, **script.by_choice[choice]) if choice < len(script.by_choice) else script


def _main() -> None:
    from serve import cli
    from serve.settings import Settings

    def make_backend(settings: Settings) -> FakeBackend:
        names = (settings.drafter, *settings.further_drafters)
        return FakeBackend(drafters=tuple(name.partition(":")[0] for name in names))

    cli.make_backend = make_backend
    cli.main()


if __name__ == "__main__":
    _main()
