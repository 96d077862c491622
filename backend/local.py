"""ChatBackend over the in-process engine: template and tokenizer on one side, the engine thread on the other.

Everything here runs on the event loop; what the engine tells it arrives through `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from backend.drafters.mtp import MTPDrafter
from backend.drafters.protocol import Drafter
from backend.engine.build import build_string, describe_build
from backend.engine.engine import Engine
from backend.engine.probe import ProbeReport, probe
from backend.engine.runner import Runner
from backend.engine.sampling import Sampler, SamplingParams
from backend.engine.sequence import Emission, EmittedToken, Sequence
from backend.engine.speculation import Speculation
from backend.interface import (
    Alternative,
    BackendError,
    BackendUnavailable,
    ChatEvent,
    ChatRequest,
    EngineStats,
    Fingerprints,
    InvalidRequest,
    ModelInfo,
    Result,
    Timings,
    TokenInfo,
)
from backend.models.config import ModelConfig
from backend.models.hub import resolve_model
from backend.models.weights import load_model
from backend.text.answer import AnswerText
from backend.text.defaults import SamplingDefaults
from backend.text.reasoning import ReasoningSplitter
from backend.text.tokenizer import ChatTokenizer, Prompt

DEFAULT_MAX_TOKENS = 16384
_WORTH_SHARING = 512  # hidden size
CPU_MODEL, GPU_MODEL = "tiny", "Qwen/Qwen3.5-9B"


def default_model(device: str) -> str:
    """What to serve where nothing was asked for: the bundled model without a GPU, the 9B with one."""
    return GPU_MODEL if device != "cpu" and torch.cuda.is_available() else CPU_MODEL


@dataclass(frozen=True)
class LocalOptions:
    """How to load and decode. `device` and `dtype` may be "auto"; `threads` None leaves it to the model's size."""

    model: str = "tiny"
    device: str = "auto"  # auto | cpu | cuda[:N]
    dtype: str = "auto"  # auto | bfloat16 | float32
    drafter: str = "mtp"  # mtp | none
    draft_tokens: int = 2  # 0 … 8
    threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 16
    name: str | None = None


@dataclass(frozen=True)
class Loaded:
    """A model ready to decode, and the facts about it."""

    speculation: Speculation
    tokenizer: ChatTokenizer
    config: ModelConfig
    defaults: SamplingDefaults
    fingerprints: Fingerprints
    build: dict[str, object]
    probe: ProbeReport

    @property
    def vocab(self) -> int:
        """Ids that may be chosen: the head's rows past the tokenizer's are padding."""
        return min(self.config.vocab_size, self.tokenizer.vocab_size)


def load(options: LocalOptions) -> Loaded:
    """Weights, tokenizer, probe and drafter, on the calling thread. Raises BackendError in one line."""
    device = _device(options.device)
    dtype = _dtype(options.dtype, device)
    directory = resolve_model(options.model)
    torch.set_num_threads(options.threads or _default_threads(ModelConfig.from_directory(directory)))
    tokenizer = ChatTokenizer.load(directory)
    with_mtp = options.drafter == "mtp"
    loaded = load_model(directory, device, dtype, with_mtp=with_mtp)
    runner = Runner(loaded.model)
    with torch.inference_mode():
        report = probe(runner)
    drafter: Drafter | None = MTPDrafter(loaded.model, loaded.drafter) if with_mtp else None
    build = describe_build(runner, report)
    fingerprints = Fingerprints(
        weights=loaded.weights,
        tokenizer=tokenizer.fingerprint,
        chat_template=tokenizer.template_fingerprint,
        drafter=loaded.drafter,
        build=build_string(build),
    )
    speculation = Speculation(runner, drafter, options.draft_tokens if drafter else 0)
    defaults = SamplingDefaults.load(directory)
    return Loaded(speculation, tokenizer, loaded.config, defaults, fingerprints, build, report)


def _default_threads(config: ModelConfig) -> int:
    """One for models whose products are too small to share: there the threads' waiting costs more than they save."""
    return 1 if config.hidden_size < _WORTH_SHARING else torch.get_num_threads()


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise BackendError(f"device {name!r} asked for, but torch sees no CUDA device")
    try:
        return torch.device(name)
    except RuntimeError:
        raise BackendError(f"unknown device {name!r}: expected auto, cpu or cuda") from None


def _dtype(name: str, device: torch.device) -> torch.dtype:
    known = {"bfloat16": torch.bfloat16, "float32": torch.float32, "auto": torch.bfloat16}
    if name not in known:
        raise BackendError(f"unknown dtype {name!r}: expected auto, bfloat16 or float32")
    return known[name]


class LocalBackend:
    """See `backend.interface.ChatBackend`."""

    def __init__(self, options: LocalOptions) -> None:
        if options.drafter not in ("mtp", "none"):
            raise BackendError(f"unknown drafter {options.drafter!r}: expected mtp or none")
        if not 0 <= options.draft_tokens <= 8:
            raise BackendError(f"draft_tokens is {options.draft_tokens}: expected 0 to 8")
        self._options = options
        self._loaded: Loaded | None = None
        self._encoding: set[str] = set()  # requests still wanted whose prompt is being made: the engine knows none yet
        slots = options.draft_tokens if options.drafter != "none" else 0
        self._engine = Engine(self._load, max_sequences=options.max_num_seqs, draft_slots=slots)

    def _load(self) -> Speculation:
        self._loaded = load(self._options)
        return self._loaded.speculation

    async def start(self) -> None:
        await asyncio.to_thread(self._engine.start)

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)

    def ready(self) -> bool:
        return self._engine.alive

    @property
    def _ready(self) -> Loaded:
        if self._loaded is None:
            raise BackendUnavailable("the model is still loading")
        return self._loaded

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may hold, prompt and answer together."""
        longest = self._ready.config.max_position_embeddings
        return min(self._options.max_model_len or longest, longest)

    def info(self) -> ModelInfo:
        loaded = self._ready
        return ModelInfo(
            name=self._options.name or self._options.model,
            max_model_len=self.max_model_len,
            drafter=self._drafter_name,
            draft_tokens=loaded.speculation.draft_tokens,
            fingerprints=loaded.fingerprints,
            build=loaded.build,
            probe=loaded.probe.as_json(),
        )

    @property
    def _drafter_name(self) -> str:
        drafter = self._ready.speculation.drafter
        return drafter.name if drafter else "none"

    def stats(self) -> EngineStats:
        running, waiting, tokens = self._engine.load()
        drafts, proposed, accepted, recent_proposed, recent_accepted = self._engine.counts.snapshot()
        return EngineStats(
            running=running,
            waiting=waiting,
            kv_cache_usage=min(tokens / (self._options.max_num_seqs * self.max_model_len), 1.0),
            drafter=self._drafter_name,
            drafts=drafts,
            draft_tokens=sum(proposed),
            accepted_tokens=sum(accepted),
            draft_tokens_per_pos=proposed,
            accepted_tokens_per_pos=accepted,
            recent_draft_tokens_per_pos=recent_proposed,
            recent_accepted_tokens_per_pos=recent_accepted,
        )

    def cancel(self, request_id: str) -> None:
        self._encoding.discard(request_id)
        self._engine.cancel(request_id)

    async def chat(self, request: ChatRequest) -> AsyncIterator[ChatEvent]:
        loaded = self._ready
        self._encoding.add(request.id)
        try:
            prompt = await asyncio.to_thread(loaded.tokenizer.encode_chat, request.messages, request.template_kwargs)
        finally:
            wanted = request.id in self._encoding
            self._encoding.discard(request.id)
        loop = asyncio.get_running_loop()
        emissions: asyncio.Queue[Emission] = asyncio.Queue()

        def deliver(emission: Emission) -> None:
            with suppress(RuntimeError):  # the loop is gone: so is whoever would read it
                loop.call_soon_threadsafe(emissions.put_nowait, emission)

        sequence = self._sequence(request, prompt, deliver)
        sequence.cancelled = not wanted
        self._engine.submit(sequence)
        answer = _Answer(loaded, prompt, sequence, request.sampling.stop)
        try:
            while True:
                event = answer.event(await emissions.get())
                yield event
                if event.result is not None:
                    return
        finally:
            self._engine.cancel(sequence.id)

    def _sequence(self, request: ChatRequest, prompt: Prompt, deliver: Callable[[Emission], None]) -> Sequence:
        loaded, asked = self._ready, request.sampling
        room = self.max_model_len - len(prompt.ids)
        if room < 1:
            raise InvalidRequest(
                f"This model's maximum context length is {self.max_model_len} tokens, "
                f"but the prompt alone has {len(prompt.ids)}.",
                param="messages",
                code="context_length_exceeded",
            )
        if asked.max_tokens is not None and asked.max_tokens > room:
            raise InvalidRequest(
                f"This model's maximum context length is {self.max_model_len} tokens, but {len(prompt.ids)} "
                f"(prompt) + {asked.max_tokens} (answer) were asked for.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        defaults = loaded.defaults.for_mode(thinking=prompt.in_reasoning)
        params = SamplingParams(
            temperature=defaults.temperature if asked.temperature is None else asked.temperature,
            top_p=defaults.top_p if asked.top_p is None else asked.top_p,
            top_k=defaults.top_k if asked.top_k is None else asked.top_k,
            min_p=defaults.min_p if asked.min_p is None else asked.min_p,
            seed=secrets.randbits(63) if asked.seed is None else asked.seed,
        )
        return Sequence(
            id=request.id,
            prompt=prompt.ids,
            sampler=Sampler(params, loaded.vocab),
            max_tokens=asked.max_tokens or min(room, DEFAULT_MAX_TOKENS),
            eos_ids=loaded.tokenizer.eos_ids,
            text=AnswerText(loaded.tokenizer.text_bytes, asked.stop),
            alternatives=asked.top_logprobs,
            on_emission=deliver,
        )


class _Answer:
    """Turns a sequence's emissions into events, and the last one into its result."""

    def __init__(self, loaded: Loaded, prompt: Prompt, sequence: Sequence, stops: tuple[str, ...]) -> None:
        self._loaded, self._prompt, self._sequence, self._stops = loaded, prompt, sequence, stops
        self._split = ReasoningSplitter(prompt.in_reasoning)
        self._content: list[str] = []
        self._reasoning: list[str] = []

    def event(self, emission: Emission) -> ChatEvent:
        piece = self._split.push(emission.text)
        content, reasoning = piece.content, piece.reasoning
        if emission.finish is not None:
            rest = self._split.finish()
            content, reasoning = content + rest.content, reasoning + rest.reasoning
        self._content.append(content)
        self._reasoning.append(reasoning)
        return ChatEvent(
            content=content,
            reasoning=reasoning,
            tokens=tuple(self._token(token) for token in emission.tokens),
            result=self._result(emission) if emission.finish is not None else None,
        )

    def _token(self, token: EmittedToken) -> TokenInfo:
        data = self._loaded.tokenizer.token_bytes(token.token_id)
        return TokenInfo(
            token_id=token.token_id,
            text=data.decode("utf-8", errors="replace"),
            bytes=data,
            logprob=token.logprob,
            alternatives=tuple(self._alternative(*pair) for pair in token.alternatives),
        )

    def _alternative(self, token_id: int, logprob: float) -> Alternative:
        data = self._loaded.tokenizer.token_bytes(token_id)
        return Alternative(token_id, data.decode("utf-8", errors="replace"), data, logprob)

    def _result(self, emission: Emission) -> Result:
        sequence, params = self._sequence, self._sequence.sampler.params
        assert emission.finish is not None
        drafter = self._loaded.speculation.drafter
        return Result(
            finish_reason=emission.finish,
            prompt_ids=sequence.prompt,
            completion_ids=tuple(sequence.tokens),
            logprobs=tuple(sequence.logprobs),
            seed=params.seed,
            sampling={
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "min_p": params.min_p,
                "max_tokens": sequence.max_tokens,
                "stop": list(self._stops),
            },
            drafter=drafter.name if drafter else "none",
            steps=tuple(sequence.steps),
            fingerprints=self._loaded.fingerprints,
            timings=_timings(sequence),
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            stop_string=sequence.stop_string,
            error=emission.error,
            first_user_end=self._prompt.first_user_end,
            reasoning_tokens=self._reasoning_tokens(),
        )

    def _reasoning_tokens(self) -> int:
        """Tokens before `</think>`; all of them where the answer never left its reasoning."""
        if not self._prompt.in_reasoning:
            return 0
        end, tokens = self._loaded.tokenizer.literal_id("</think>"), self._sequence.tokens
        return tokens.index(end) if end in tokens else len(tokens)


def _timings(sequence: Sequence) -> Timings:
    """Milliseconds between submission, admission, first token and end; a stage never reached took none."""
    end = sequence.finished_at or sequence.submitted_at
    admitted = sequence.admitted_at or end
    first = sequence.first_token_at or end
    return Timings(
        queue_ms=(admitted - sequence.submitted_at) * 1e3,
        prompt_n=sequence.prefilled,
        prompt_ms=(first - admitted) * 1e3,
        predicted_n=len(sequence.tokens),
        predicted_ms=(end - first) * 1e3,
    )
