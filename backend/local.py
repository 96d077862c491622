"""ChatBackend over the in-process engine: template and tokenizer on one side, the engine thread on the other.

Everything here runs on the event loop; what the engine tells it arrives through `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from collections.abc import Sequence as Ids
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from typing import Any

from backend.answer import Answer
from backend.constraints import constraint
from backend.drafters.prediction import PredictionState
from backend.drafters.protocol import Drafter
from backend.engine.engine import Engine
from backend.engine.loop import Loop
from backend.engine.parameters import PENALTIES, SamplingParams
from backend.engine.sampling import Sampler
from backend.engine.sequence import Emission, Sequence
from backend.engine.statistics import SpeculationCounts
from backend.interface import (
    BackendError,
    BackendUnavailable,
    ChatEvent,
    ChatRequest,
    EngineStats,
    InvalidRequest,
    ModelInfo,
    SamplingRequest,
)
from backend.live_drafters import LiveDrafters
from backend.loading import MOST_DRAFTS, Loaded, LocalOptions, load
from backend.text.answer import AnswerText
from backend.text.phases import Matcher
from backend.text.tokenizer import ChatTokenizer, Prompt
from backend.text.untrusted import strings

DEFAULT_MAX_TOKENS = 16384
LONG_TEXT = 2**20  # characters; tokenizing a text takes a hundred times its size in memory
MOST_PROMPT_LOGPROBS = 2**20  # of one request, alternatives included
_KINDS = ("mtp", "none", "prediction", "hot_vocab", "student")


class LocalBackend:
    """See `backend.interface.ChatBackend`."""

    def __init__(self, options: LocalOptions) -> None:
        kinds = [name.partition(":")[0] for name in (options.drafter, *options.further_drafters)]
        if unknown := [kind for kind in kinds if kind not in _KINDS]:
            raise BackendError(
                f"unknown drafter {unknown[0]!r}: expected mtp, none, prediction, hot_vocab:FILE or student:DIR"
            )
        if options.draft_tokens != "auto" and not 0 <= options.draft_tokens <= MOST_DRAFTS:
            raise BackendError(f"draft_tokens is {options.draft_tokens}: expected auto or 0 to {MOST_DRAFTS}")
        self._options = options
        self._loaded: Loaded | None = None
        self._encoding: set[str] = set()  # requests still wanted whose prompt is being made: the engine knows none yet
        self._long_text = asyncio.Lock()
        slots = MOST_DRAFTS if options.draft_tokens == "auto" else options.draft_tokens
        self._counts = SpeculationCounts((), slots)
        self._engine = Engine(self._load, self._counts)
        self._drafters = LiveDrafters(options.drafter_dir, self._engine, self._counts)

    def _load(self) -> Loop:
        loaded = load(self._options)
        self._drafters.adopt(loaded.drafters, loaded.default)
        loaded.loop.speculation.watch = self._drafters.watch
        self._loaded = replace(loaded, drafters={}, default=None)  # they are not to outlive their unloading
        return loaded.loop

    async def start(self) -> None:
        await asyncio.to_thread(self._engine.start)

    async def close(self) -> None:
        self._drafters.close()
        await asyncio.to_thread(self._engine.close)

    def ready(self) -> bool:
        return self._engine.alive

    def failed(self) -> bool:
        return self._engine.failed

    @property
    def _ready(self) -> Loaded:
        if self._loaded is None:
            raise BackendUnavailable("the model is still loading")
        return self._loaded

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may hold, prompt and answer together: the model's limit, or less where memory is short."""
        loaded = self._ready
        longest = min(loaded.config.max_position_embeddings, loaded.loop.scheduler.longest)
        return min(self._options.max_model_len or longest, longest)

    def info(self) -> ModelInfo:
        loaded, drafter = self._ready, self._drafters.active
        return ModelInfo(
            name=self._options.name or self._options.model,
            max_model_len=self.max_model_len,
            drafter=self._drafters.default.name,
            draft_tokens=self._options.draft_tokens if drafter else 0,
            fingerprints=replace(loaded.fingerprints, drafter=drafter.fingerprint if drafter else "none"),
            build=loaded.build,
            probe=loaded.probe.as_json(),
            tokenizer=loaded.tokenizer.described(),
            sampling={mode: asdict(getattr(loaded.defaults, mode)) for mode in ("thinking", "non_thinking")},
        )

    def stats(self) -> EngineStats:
        loop = self._ready.loop
        prefix, default, states = loop.scheduler.prefix, self._drafters.default, self._drafters.states()
        return EngineStats(
            running=len(loop.scheduler.running),
            waiting=self._engine.waiting,
            kv_cache_usage=loop.scheduler.usage,
            prefix_cache_queries=prefix.queries if prefix is not None else 0,
            prefix_cache_hits=prefix.hits if prefix is not None else 0,
            preemptions=loop.scheduler.preemptions,
            draft_tokens=loop.speculation.draft_tokens,
            drafters=tuple(sorted(self._counts.snapshot(), key=lambda one: one.drafter != default.name)),
            restarts=self._engine.restarts,
            drafter_states=states,
            canary_share=default.canary.share if default.canary else 0.0,
            step_times={name: self._counts.times(name) for name in states},
        )

    def engine(self) -> Mapping[str, Any]:
        loaded = self._ready
        scheduler, table = loaded.loop.scheduler, loaded.loop.scheduler.memory.table
        prefix = scheduler.prefix
        return {
            "running": [_describe(sequence) for sequence in list(scheduler.running)],
            "waiting": self._engine.waiting,
            "restarts": self._engine.restarts,
            "preemptions": scheduler.preemptions,
            "draft_tokens": {"asked": self._options.draft_tokens, "now": loaded.loop.speculation.draft_tokens},
            "drafters": self._drafters.fingerprints(),
            "drafter_states": self._drafters.states(),
            "default_drafters": self._drafters.default.as_json(),
            "canary": self._drafters.canary(),
            "pages": {"total": table.total, "free": table.free, "held_by_running": scheduler.usage},
            "prefix_cache": {
                "snapshots": len(prefix),
                "snapshot_bytes": prefix.bytes,
                "queried_tokens": prefix.queries,
                "hit_tokens": prefix.hits,
            }
            if prefix is not None
            else None,
        }

    def list_drafters(self) -> Mapping[str, Any]:
        return self._swap.as_json()

    async def load_drafter(self, path: str, name: str | None, min_acceptance: float) -> Mapping[str, Any]:
        return await self._swap.load(self._ready, path, name, min_acceptance)

    async def unload_drafter(self, name: str) -> None:
        await self._swap.unload(name)

    def promote(self, drafter: str, canary: float | None = None) -> None:
        self._swap.promote(drafter, canary)

    def roll_back(self) -> None:
        self._swap.default.roll_back()

    @property
    def _swap(self) -> LiveDrafters:
        """The drafters, once there are any. Raises BackendUnavailable."""
        if self._loaded is None:
            raise BackendUnavailable("the model is still loading")
        return self._drafters

    def cancel(self, request_id: str) -> None:
        self._encoding.discard(request_id)
        self._engine.cancel(request_id)

    async def tokenize(self, request: ChatRequest) -> tuple[tuple[int, ...], str]:
        async with self._turn(request):
            prompt = await asyncio.to_thread(self._prompt, request)
        if request.prompt is None:
            return prompt.ids, prompt.text
        return prompt.ids, b"".join(await self.detokenize(prompt.ids)).decode("utf-8", errors="replace")

    async def detokenize(self, ids: Ids[int]) -> Ids[bytes]:
        self._require_tokens(ids, "tokens")
        return await asyncio.to_thread(lambda: [self._ready.tokenizer.token_bytes(token) for token in ids])

    async def chat(self, request: ChatRequest) -> AsyncIterator[ChatEvent]:
        loaded = self._ready
        self._encoding.add(request.id)
        try:
            async with self._turn(request):
                prompt, matcher = await asyncio.to_thread(self._prepare, request)
        finally:
            wanted = request.id in self._encoding
            self._encoding.discard(request.id)
        loop = asyncio.get_running_loop()
        emissions: asyncio.Queue[Emission] = asyncio.Queue()

        def arrive(emission: Emission) -> None:
            emissions.put_nowait(emission)
            if emission.finish:
                self._drafters.let_go(drafter)

        def deliver(emission: Emission) -> None:
            with suppress(RuntimeError):  # the loop is gone: so is whoever would read it
                loop.call_soon_threadsafe(arrive, emission)

        drafter = self._drafters.of(request.id, request.drafter)
        sequence = self._sequence(request, prompt, matcher, drafter, deliver)
        sequence.cancelled = not wanted
        self._engine.submit(sequence)
        self._drafters.hold(drafter)  # before anything of it can arrive here
        answer = Answer(loaded, prompt, sequence, request)
        try:
            while True:
                event = answer.event(await emissions.get())
                yield event
                if event.result is not None:
                    return
        finally:
            self._engine.cancel(sequence.id)

    def _turn(self, request: ChatRequest) -> AbstractAsyncContextManager[None]:
        """Long texts are tokenized one at a time, and leave threads to the others."""
        text = request.prompt if isinstance(request.prompt, str) else ""
        said = sum(map(len, strings([text, request.messages, request.tools])))
        return self._long_text if said > LONG_TEXT else nullcontext()

    def _prepare(self, request: ChatRequest) -> tuple[Prompt, Matcher | None]:
        prompt = self._prompt(request)
        return prompt, constraint(request, prompt, self._ready.tokenizer, self._ready.grammars)

    def _prompt(self, request: ChatRequest) -> Prompt:
        """A raw prompt is taken as it is: no turn of it is known, and nothing of its answer is reasoning."""
        tokenizer = self._ready.tokenizer
        if request.prompt is None:
            tools = request.tools if request.tool_choice != "none" else ()
            return tokenizer.encode_chat(request.messages, request.template_kwargs, tools)
        if isinstance(request.prompt, str):
            return tokenizer.encode_text(request.prompt)
        self._require_tokens(request.prompt, "prompt")
        return Prompt(request.prompt, text="", first_user_end=0, in_reasoning=False)

    def _require_tokens(self, ids: Iterable[int], param: str) -> None:
        vocab = self._ready.vocab
        if wrong := [token for token in ids if not 0 <= token < vocab]:
            raise InvalidRequest(f"There is no token {wrong[0]}: ids are 0 to {vocab - 1}.", param)

    def _sequence(
        self,
        request: ChatRequest,
        prompt: Prompt,
        matcher: Matcher | None,
        drafter: Drafter | None,
        deliver: Callable[[Emission], None],
    ) -> Sequence:
        loaded, asked = self._ready, request.sampling
        room = self.max_model_len - len(prompt.ids)
        if not prompt.ids:
            raise InvalidRequest("The prompt is empty: it needs at least one token.", param="prompt")
        if room < (1 if asked.max_tokens is None else min(asked.max_tokens, 1)):
            raise InvalidRequest(
                f"This model's maximum context length is {self.max_model_len} tokens, "
                f"but the prompt alone has {len(prompt.ids)}.",
                param="messages" if request.prompt is None else "prompt",
                code="context_length_exceeded",
            )
        if asked.max_tokens is not None and asked.max_tokens > room:
            raise InvalidRequest(
                f"This model's maximum context length is {self.max_model_len} tokens, but {len(prompt.ids)} "
                f"(prompt) + {asked.max_tokens} (answer) were asked for.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if asked.prompt_logprobs is not None and len(prompt.ids) * (1 + asked.prompt_logprobs) > MOST_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"A prompt of {len(prompt.ids)} tokens can be told of with at most "
                f"{MOST_PROMPT_LOGPROBS // len(prompt.ids) - 1} alternatives to each.",
                param="logprobs",
            )
        params = self._params(asked, prompt)
        predicted = loaded.tokenizer.plain(request.prediction) if request.prediction else None
        return Sequence(
            id=request.id,
            prompt=prompt.ids,
            sampler=Sampler(params, loaded.vocab, prompt.ids, matcher),
            max_tokens=min(room, DEFAULT_MAX_TOKENS) if asked.max_tokens is None else asked.max_tokens,
            eos_ids=params.stop_token_ids,
            text=AnswerText(loaded.tokenizer.text_bytes, asked.stop),
            alternatives=asked.top_logprobs,
            prompt_alternatives=asked.prompt_logprobs,
            on_emission=deliver,
            drafter=drafter,
            prediction=PredictionState(prompt.ids, predicted) if predicted else None,
            salt=request.cache_salt or "",
            last_turn=prompt.last_user_start,
        )

    def _params(self, asked: SamplingRequest, prompt: Prompt) -> SamplingParams:
        """Effective values: what was asked for, else the defaults of the model and its thinking mode."""
        loaded = self._ready
        defaults = loaded.defaults.for_mode(thinking=prompt.in_reasoning)
        given = {
            name: getattr(defaults, name) if (value := getattr(asked, name)) is None else value
            for name in (*("temperature", "top_p", "top_k", "min_p"), *PENALTIES)
        }
        self._require_tokens(asked.logit_bias, "logit_bias")
        self._require_tokens(asked.stop_token_ids, "stop_token_ids")
        ends = frozenset() if asked.ignore_eos else loaded.tokenizer.eos_ids
        return SamplingParams(
            **given,
            seed=secrets.randbits(63) if asked.seed is None else asked.seed,
            choice=asked.choice,
            logit_bias=tuple(sorted(asked.logit_bias.items())),
            bad_words=_bad_word_ids(loaded.tokenizer, asked.bad_words),
            min_tokens=asked.min_tokens,
            stop_token_ids=ends | frozenset(asked.stop_token_ids),
        )


def _bad_word_ids(tokenizer: ChatTokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands and after a space, as vLLM bans them."""
    spelled = (prefix + word.lstrip() for word in words for prefix in ("", " "))
    return tuple(dict.fromkeys(tuple(tokenizer.plain(word)) for word in spelled))


def _describe(sequence: Sequence) -> dict[str, Any]:
    return {
        "id": sequence.id,
        "prompt_tokens": len(sequence.prompt),
        "prefilled": sequence.prefilled,
        "cached_tokens": sequence.cached,
        "completion_tokens": len(sequence.tokens),
        "max_tokens": sequence.max_tokens,
        "drafter": sequence.drafter.name if sequence.drafter else "none",
        "decoding": sequence.decoding,
    }
