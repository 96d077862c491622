"""What serve sees of a backend: one request in, a stream of events out, and facts about the build.

Frozen dataclasses and one protocol; knows no HTTP, no tensor and no database.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length", "cancelled", "error"]


class BackendError(Exception):
    """Base of everything a backend raises on purpose. `str(error)` is fit for a user."""


class InvalidRequest(BackendError):
    """The request cannot be served as asked.

    `param` names the offending field; `code` is OpenAI's error code where one exists
    (`context_length_exceeded`, ...).
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class BackendUnavailable(BackendError):
    """The backend cannot take requests now (starting, draining or failed)."""


class GenerationFailed(BackendError):
    """A running generation was ended by a fault of the backend."""


class GenerationTimedOut(GenerationFailed):
    """A generation was ended because it took too long."""


@dataclass(frozen=True)
class Grammar:
    """What the answer must match: `kind` json_object (source empty), json_schema (JSON text), regex or lark."""

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    source: str = ""


@dataclass(frozen=True)
class SamplingRequest:
    """What the client asked for; None means the backend's default for this model and thinking mode."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0  # alternatives per token on `ChatEvent.tokens`; 0 … 64
    presence_penalty: float | None = None  # subtracted once from every token of the output so far
    frequency_penalty: float | None = None  # subtracted per occurrence in the output so far
    repetition_penalty: float | None = None  # divides (multiplies, if negative) logits of tokens in prompt and output
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id → added to its logit
    bad_words: tuple[str, ...] = ()  # texts the answer may not contain, as vLLM's
    min_tokens: int = 0  # no end of text and no stop token before this many
    ignore_eos: bool = False  # the model's end-of-text tokens end nothing
    stop_token_ids: tuple[int, ...] = ()  # further ids that end the answer
    grammar: Grammar | None = None  # of the content: what the model thinks before it is free
    choice: int = 0  # i of n: choices of one seed draw independent noise
    prompt_logprobs: int | None = None  # alternatives on `ChatEvent.prompt_tokens`; None: those are not asked for


@dataclass(frozen=True)
class ChatRequest:
    """One completion. `messages` are OpenAI message objects, content already flattened to text or None.

    `prompt`: instead of messages the whole prompt, as text in which special tokens are meant, or as token ids.
    `tools`: OpenAI's tool objects. `tool_choice`: none hides them from the model, required makes it call one, of that
    `tool_name` where given. `parallel_tool_calls` False: at most one call. `thinking_budget`: the most tokens before
    `</think>`, which is then forced. `prediction`: OpenAI's predicted output, a draft. `drafter`: the name of a loaded
    drafter for this request alone. `cache_salt`: requests of different salts share no prefix cache. `raw`: the body
    as the client sent it, for a backend that passes it on. `private`: whoever it is passed on to is not to keep it.
    """

    id: str
    messages: Sequence[Mapping[str, Any]] = ()
    sampling: SamplingRequest = SamplingRequest()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | tuple[int, ...] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Literal["none", "auto", "required"] = "auto"
    tool_name: str | None = None
    parallel_tool_calls: bool = True
    thinking_budget: int | None = None
    prediction: str | None = None
    drafter: str | None = None
    cache_salt: str | None = None
    raw: Mapping[str, Any] | None = None
    private: bool = False


@dataclass(frozen=True)
class Alternative:
    """One of the `top_logprobs` candidates of a position."""

    token_id: int
    text: str  # lossy view: U+FFFD where the bytes are not whole characters
    bytes: bytes
    logprob: float


@dataclass(frozen=True)
class TokenInfo:
    """One emitted token: log-softmax of the raw target logits, and the alternatives asked for, best first.

    `rank`, of a prompt's token: its place among all tokens by their logits, from 1. `silent`: a special token, of which
    the answer's text shows nothing. `part`: of the answer, what the token belongs to, its markup included.
    """

    token_id: int
    text: str
    bytes: bytes
    logprob: float
    alternatives: tuple[Alternative, ...] = ()
    rank: int | None = None
    silent: bool = False
    part: Literal["reasoning", "content", "call"] = "content"


@dataclass(frozen=True)
class ToolCall:
    """A function the model calls; `arguments` is JSON text, whole unless the answer was cut off inside it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of the call `index`: its id and name in the first alone, then its arguments bit by bit."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Step:
    """One verify step as DESIGN §6 counts it: slots proposed and slots accepted."""

    drafted: int
    accepted: int


@dataclass(frozen=True)
class Fingerprints:
    """Provenance (law L4): sha256 hex digests, and the build string within which results are bitwise equal."""

    weights: str
    tokenizer: str
    chat_template: str
    drafter: str
    build: str


@dataclass(frozen=True)
class Timings:
    """Milliseconds and counts of one request, with llama.cpp's meanings.

    `prompt_ms`: admission to first token. `predicted_ms`: first token to last. `queue_ms`: submission to admission.
    """

    queue_ms: float
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float


@dataclass(frozen=True)
class Result:
    """Everything a capture record needs of a generation, however it ended."""

    finish_reason: FinishReason
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # one per completion id, of the raw target distribution
    seed: int | None  # None: an upstream drew it, or none at all
    sampling: Mapping[str, Any]  # effective parameters: temperature, top_p, top_k, min_p, max_tokens, stop
    drafter: str  # name: "mtp", "none", ...
    steps: tuple[Step, ...]
    fingerprints: Fingerprints
    timings: Timings
    content: str
    reasoning: str
    stop_string: str | None = None  # the stop string that ended it, if one did
    error: str | None = None
    first_user_end: int = 0  # prompt tokens up to and including the first user turn; 0 where it cannot be told
    reasoning_tokens: int | None = None  # completion tokens through `</think>`; None where they were not counted
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    accepted_prediction_tokens: int | None = None  # of `ChatRequest.prediction`; None where there was none
    rejected_prediction_tokens: int | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    upstream: Upstream | None = None  # where another server generated it

    @property
    def prompt_count(self) -> int:
        """Prompt tokens, also where their ids are unknown."""
        return len(self.prompt_ids) if self.upstream is None else self.upstream.prompt_tokens

    @property
    def completion_count(self) -> int:
        """Emitted tokens of the whole answer, also where their ids are unknown."""
        return len(self.completion_ids) if self.upstream is None else self.upstream.completion_tokens


@dataclass(frozen=True)
class Upstream:
    """What only an upstream's answer has. Ids that it did not tell are unknown, not empty.

    The counts are those of the whole answer, 0 where the upstream told none, and 0 on `siblings`: the further choices
    of the same answer, each a row of its own. `status` and `headers` are for a client that has heard nothing yet when
    the answer fails; `error_body` is the upstream's own, to be passed on as it is.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_told: bool = False
    completion_told: bool = False
    siblings: tuple[Result, ...] = ()
    status: int = 200
    error_body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatEvent:
    """A piece of the answer. Concatenated `content`, `reasoning` and `tool_calls` equal the final result's.

    Exactly one event, the last, carries `result`. `tokens` lists the tokens whose text this event completes or
    advances (a token whose bytes are held back appears when it is emitted by the engine, not when its text is).
    Within one event reasoning comes before content, content before tool calls. `raw` are an upstream's own chunks (or
    its one answer), forwarded unchanged; where the result is, those that say the answer has ended. `prompt_tokens` are
    the next of the prompt's, where its logprobs were asked for: all before the answer, the first one's logprob NaN.
    `step` is the verify step whose tokens these are, the accepted drafts first, and `drafted_by` what proposed them; an
    answer's first token belongs to none.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    tokens: tuple[TokenInfo, ...] = ()
    result: Result | None = None
    prompt_tokens: tuple[TokenInfo, ...] = ()
    raw: tuple[Mapping[str, Any], ...] = ()
    step: Step | None = None
    drafted_by: str = "none"


@dataclass(frozen=True)
class ModelInfo:
    """What /v1/models, /version and /tokenizer_info say; all mappings are JSON-ready.

    `sampling`: by thinking mode (thinking, non_thinking), the parameters of a request that gives none. `tokenizer`:
    its special tokens by their roles (eos_token, ...) and its chat_template; empty where it is not known.
    """

    name: str
    max_model_len: int
    drafter: str  # the default one, as of now
    draft_tokens: int | Literal["auto"]
    fingerprints: Fingerprints
    build: Mapping[str, Any]
    probe: Mapping[str, Any]
    sampling: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepTimes:
    """Verify steps of one drafter's sequences alone, with nothing beside them, at about one batch size.

    So τ = 1 + accepted / sequences, and (t_draft + t_verify) = seconds / steps.
    """

    batch: int  # sequences of a step, rounded up to a power of two
    steps: int = 0
    sequences: int = 0  # of all the steps
    accepted: int = 0  # draft tokens
    seconds: float = 0.0


@dataclass(frozen=True)
class DrafterStats:
    """Counters of one drafter since start (DESIGN §6); tuples are indexed by slot."""

    drafter: str
    drafts: int  # verify steps that proposed at least one slot
    draft_tokens_per_pos: tuple[int, ...]
    accepted_tokens_per_pos: tuple[int, ...]
    recent_draft_tokens_per_pos: tuple[int, ...]  # last 60 s
    recent_accepted_tokens_per_pos: tuple[int, ...]

    @property
    def draft_tokens(self) -> int:
        return sum(self.draft_tokens_per_pos)

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_tokens_per_pos)


@dataclass(frozen=True)
class EngineStats:
    """A consistent snapshot of the engine's counters since start."""

    running: int
    waiting: int
    kv_cache_usage: float | None  # 0 … 1: pages held by running sequences; None: the backend has no cache of its own
    prefix_cache_queries: int  # prompt tokens looked up
    prefix_cache_hits: int  # prompt tokens found
    preemptions: int
    draft_tokens: int  # K of the last verify step
    drafters: tuple[DrafterStats, ...]  # one per loaded drafter, the default first
    restarts: int = 0  # of an engine that had crashed
    drafter_states: Mapping[str, str] = field(default_factory=dict)  # of each: active, previous, canary, ...
    canary_share: float = 0.0  # of the requests, for the one whose state is canary
    step_times: Mapping[str, Sequence[StepTimes]] = field(default_factory=dict)  # by drafter, "none" for without any
    upstream_metrics: str = ""  # an upstream's own metrics, in Prometheus' text format, as long as they are fresh


class ChatBackend(Protocol):
    """A source of chat completions. All methods are called from one asyncio event loop."""

    async def start(self) -> None:
        """Load and become ready. Raises BackendError with one clear line when it cannot."""

    async def close(self) -> None:
        """Cancel what still runs and release everything."""

    def info(self) -> ModelInfo: ...

    def stats(self) -> EngineStats: ...

    def ready(self) -> bool:
        """Whether a request given now would start."""

    def failed(self) -> bool:
        """Whether it will never be ready again: only a new process can be."""

    def engine(self) -> Mapping[str, Any]:
        """JSON-ready view for an operator: running and waiting sequences, K in use, cache pages and snapshots."""

    def chat(self, request: ChatRequest) -> AsyncIterator[ChatEvent]:
        """Generate. The first `__anext__` raises InvalidRequest or BackendUnavailable for requests that never start.

        Closing the iterator (`aclose`) cancels the generation within one engine step. A cancelled generation yields
        no result to a closed iterator; use `cancel` to end it early and still receive the result event with
        finish_reason "cancelled". A fault yields a result event with finish_reason "error" and `error` set.
        """

    async def tokenize(self, request: ChatRequest) -> tuple[tuple[int, ...], str]:
        """The prompt a request would have, as token ids and as text; raises as `chat` does."""

    async def detokenize(self, ids: Sequence[int]) -> Sequence[bytes]:
        """What each id stands for, special tokens shown. Raises InvalidRequest for ids the tokenizer has not."""

    def list_drafters(self) -> Mapping[str, Any]:
        """As GET /v1/drafters has them. Raises InvalidRequest where there are none, as all methods below do."""

    async def load_drafter(self, path: str, name: str | None, min_acceptance: float) -> Mapping[str, Any]:
        """Load a student beside the running drafters and try it; its entry of `list_drafters`, and how the trial went.

        `path`: inside the directory that the server allows. `min_acceptance`: of slot 0. Raises InvalidRequest for
        whatever is wrong with it, and nothing has changed then; BackendUnavailable where the backend ends meanwhile.
        """

    async def unload_drafter(self, name: str) -> None:
        """Let a drafter go that `load_drafter` brought, at once or after its last sequence. Raises InvalidRequest."""

    def promote(self, drafter: str, canary: float | None = None) -> None:
        """Make a loaded drafter, or "none", the default of the requests that come from now on.

        `canary`: only of that share of them, chosen by their ids. Those that have begun keep theirs. Raises
        InvalidRequest for any other name.
        """

    def roll_back(self) -> None:
        """End the canary or else take the last promotion back. Raises InvalidRequest where there is neither."""

    def cancel(self, request_id: str) -> None:
        """End a running generation within one step; its iterator then yields its result event. Unknown ids: no-op."""
