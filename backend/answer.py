"""One sequence's emissions as the events of its answer, and the last one as its result.

Runs on the event loop; knows no queue and no thread.
"""

from __future__ import annotations

from dataclasses import replace

from backend.engine.parameters import PENALTIES
from backend.engine.sequence import Emission, EmittedToken, Sequence
from backend.interface import Alternative, ChatEvent, ChatRequest, FinishReason, Result, Timings, TokenInfo
from backend.loading import Loaded
from backend.text.detokenizer import Detokenizer
from backend.text.parts import Part, Parts
from backend.text.reasoning import ReasoningSplitter, Split
from backend.text.tokenizer import Prompt
from backend.text.tool_calls import Parsed, ToolCallParser


class Answer:
    """Turns a sequence's emissions into events, and the last one into its result."""

    def __init__(self, loaded: Loaded, prompt: Prompt, sequence: Sequence, request: ChatRequest) -> None:
        self._loaded, self._prompt, self._sequence = loaded, prompt, sequence
        self._stops, self._thinking_budget = request.sampling.stop, request.thinking_budget
        may_call = bool(request.tools) and request.tool_choice != "none"
        # Where a grammar makes the model call, it leaves its reasoning first.
        self._split = ReasoningSplitter(prompt.in_reasoning, calls=may_call and request.tool_choice == "auto")
        self._calls = ToolCallParser(request.tools, parallel=request.parallel_tool_calls) if may_call else None
        self._parts = Parts(loaded.tokenizer, in_reasoning=prompt.in_reasoning, calls=may_call)
        self._content: list[str] = []
        self._reasoning: list[str] = []

    def event(self, emission: Emission) -> ChatEvent:
        split, rest = self._split.push(emission.text), Split()
        if emission.finish is not None:
            rest = self._split.finish()
        reasoning = split.reasoning + rest.reasoning
        parsed = self._parse(split.content + rest.content, emission.finish)
        self._content.append(parsed.content)
        self._reasoning.append(reasoning)
        tokens = tuple(self._token(token, self._parts.of(token.token_id)) for token in emission.tokens)
        if self._parts.now == "reasoning" and not self._split.in_reasoning:
            self._parts.now = "call"  # it ended the reasoning by itself
        return ChatEvent(
            content=parsed.content,
            reasoning=reasoning,
            tool_calls=parsed.calls,
            tokens=tokens,
            prompt_tokens=tuple(self._token(token) for token in emission.prompt),
            result=self._result(emission) if emission.finish is not None else None,
            step=emission.step,
            drafted_by=emission.source,
        )

    def _parse(self, content: str, finish: FinishReason | None) -> Parsed:
        if self._calls is None:
            return Parsed(content)
        parsed = self._calls.push(content)
        return parsed if finish is None else parsed + self._calls.finish(cut=finish != "stop")

    def _token(self, token: EmittedToken, part: Part = "content") -> TokenInfo:
        data = self._loaded.tokenizer.token_bytes(token.token_id)
        return TokenInfo(
            token_id=token.token_id,
            text=data.decode("utf-8", errors="replace"),
            bytes=data,
            logprob=token.logprob,
            alternatives=tuple(self._alternative(*pair) for pair in token.alternatives),
            rank=token.rank,
            silent=not self._loaded.tokenizer.text_bytes(token.token_id),
            part=part,
        )

    def _alternative(self, token_id: int, logprob: float) -> Alternative:
        data = self._loaded.tokenizer.token_bytes(token_id)
        return Alternative(token_id, data.decode("utf-8", errors="replace"), data, logprob)

    def _result(self, emission: Emission) -> Result:
        sequence, params = self._sequence, self._sequence.sampler.params
        assert emission.finish is not None
        prediction = sequence.prediction
        return Result(
            finish_reason=emission.finish,
            prompt_ids=sequence.prompt,
            completion_ids=tuple(sequence.tokens),
            logprobs=tuple(sequence.logprobs),
            seed=params.seed,
            sampling={
                "choice": params.choice,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "min_p": params.min_p,
                **{name: getattr(params, name) for name in PENALTIES},
                "logit_bias": {str(token): bias for token, bias in params.logit_bias},
                "bad_words": [list(ids) for ids in params.bad_words],
                "min_tokens": params.min_tokens,
                "stop_token_ids": sorted(params.stop_token_ids),
                "max_tokens": sequence.max_tokens,
                "stop": list(self._stops),
                "thinking_budget": self._thinking_budget,
            },
            drafter=sequence.drafter.name if sequence.drafter else "none",
            steps=tuple(sequence.steps),
            fingerprints=replace(
                self._loaded.fingerprints, drafter=sequence.drafter.fingerprint if sequence.drafter else "none"
            ),
            timings=_timings(sequence),
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            stop_string=sequence.stop_string,
            error=emission.error,
            first_user_end=self._prompt.first_user_end,
            reasoning_tokens=self._reasoning_tokens(),
            tool_calls=self._calls.calls if self._calls else (),
            cached_tokens=sequence.cached,
            accepted_prediction_tokens=prediction.accepted if prediction else None,
            rejected_prediction_tokens=prediction.rejected if prediction else None,
        )

    def _reasoning_tokens(self) -> int:
        """Tokens before the one that ends the reasoning; all of them where the answer never left it."""
        end, tokens = self._split.end, self._sequence.tokens
        if end is None:
            return len(tokens)
        text, length = Detokenizer(self._loaded.tokenizer.text_bytes), 0
        for count, token in enumerate(tokens):
            length += len(text.push(token))
            if length > end:
                return count
        return len(tokens)


def _timings(sequence: Sequence) -> Timings:
    """Milliseconds between submission, admission, first token and end; a stage never reached took none."""
    end = sequence.finished_at or sequence.submitted_at
    admitted = sequence.admitted_at or end
    first = sequence.first_token_at or end
    run = len(sequence.prompt) if sequence.tokens else sequence.prefilled  # also of one that lost its place since
    return Timings(
        queue_ms=(admitted - sequence.submitted_at) * 1e3,
        prompt_n=max(run - sequence.cached, 0),
        prompt_ms=(first - admitted) * 1e3,
        predicted_n=len(sequence.tokens),
        predicted_ms=(end - first) * 1e3,
    )
