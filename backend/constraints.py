"""What a request's answer has to be, as phases: thoughts and their budget, then a grammar, tool calls or free text.

Knows requests, prompts and the tokenizer; must never know logits or the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.interface import ChatRequest, InvalidRequest
from backend.text.grammar import BEGIN_CALL, END_CALL, GrammarCompiler
from backend.text.phases import Either, Fixed, Free, Matcher, Phase, Phases
from backend.text.tokenizer import END_THINK, ChatTokenizer, Prompt

_AFTER_THOUGHTS = "\n\n"  # as the chat template writes it


@dataclass(frozen=True)
class _Plan:
    """Phases that follow each other, the last by the one numbered `again`. `bound`: not even their start is free."""

    phases: Sequence[Callable[[], Phase]]
    bound: bool = False
    again: int | None = None


def constraint(
    request: ChatRequest, prompt: Prompt, tokenizer: ChatTokenizer, grammars: GrammarCompiler
) -> Matcher | None:
    """The matcher of a whole answer, None where everything may come. Raises InvalidRequest.

    Compiling a grammar may take a second: not for an event loop.
    """
    size, ends = tokenizer.vocab_size, tokenizer.eos_ids
    plan = _content(request, tokenizer, grammars)
    if not prompt.in_reasoning or (plan is None and request.thinking_budget is None):
        return Phases(ends, plan.phases, plan.again) if plan else None
    end_think = tokenizer.literal_id(END_THINK)
    if end_think is None:
        raise InvalidRequest(
            f"This model's tokenizer has no {END_THINK}: no rule can be kept where its thoughts have ended.",
            param="thinking_budget" if plan is None else "chat_template_kwargs",
        )
    banned = ends if plan and plan.bound else frozenset()
    before: list[Callable[[], Phase]] = [lambda: Free(size, end_think, request.thinking_budget, banned)]
    if plan and plan.bound:
        before.append(lambda: Fixed(size, tokenizer.plain(_AFTER_THOUGHTS)))
    plan = plan or _Plan([lambda: Free(size)])
    return Phases(ends, [*before, *plan.phases], None if plan.again is None else len(before) + plan.again)


def _content(request: ChatRequest, tokenizer: ChatTokenizer, grammars: GrammarCompiler) -> _Plan | None:
    """Of what comes after the thoughts; None where that is free."""
    size, many = tokenizer.vocab_size, request.parallel_tool_calls
    tools = _callable(request)
    begin, end = tokenizer.literal_id(BEGIN_CALL), tokenizer.literal_id(END_CALL)
    if tools and request.tool_choice == "required":
        return _Plan([grammars.calls(tools, many=many).fresh], bound=True)
    if request.sampling.grammar:
        grammar = grammars.matcher(request.sampling.grammar)
        if not tools or begin is None:
            return _Plan([grammar.fresh], bound=True)
        calls = grammars.calls(tools, many=many)
        return _Plan([lambda: Either(grammar.fresh(), calls.fresh(), begin)], bound=True)
    if not tools or begin is None or end is None:
        return None
    if any(tool["function"].get("strict") is True for tool in tools):
        call = grammars.calls(tools, many=False, begun=True)
        return _Plan([lambda: Free(size, begin), call.fresh], again=0 if many else None)
    return None if many else _Plan([lambda: Free(size, end)])


def _callable(request: ChatRequest) -> Sequence[Mapping[str, Any]]:
    """The tools that the model may call. Raises InvalidRequest where it must call what is not there."""
    tools = [
        tool
        for tool in request.tools
        if request.tool_choice != "none" and request.tool_name in (None, tool["function"]["name"])
    ]
    if request.tool_choice == "required" and not tools:
        wanted = "any" if request.tool_name is None else f"called {request.tool_name!r}"
        raise InvalidRequest(f"A tool has to be called, but there is none {wanted}.", param="tool_choice")
    return tools
