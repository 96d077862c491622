"""What a request's answer has to be, as phases: thoughts and their budget, then a grammar, tool calls or free text.

Knows requests, prompts and the tokenizer; must never know logits or the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from backend.interface import ChatRequest, InvalidRequest
from backend.text.grammar import BEGIN_CALL, END_CALL, GrammarCompiler
from backend.text.phases import Either, Fixed, Free, Matcher, Phase, Phases
from backend.text.tokenizer import END_THINK, ChatTokenizer, Prompt

_SHAPES = ("json_object", "json_schema")  # of an answer that is no call; other grammars are of the whole text
_AFTER_THOUGHTS = "\n\n"  # as the chat template writes it


@dataclass(frozen=True)
class _Plan:
    """Phases one after the other, after the last the one numbered `again`.

    `bound`: not even their start is free. `unthinkable`: ids that thoughts before them may not have, beside the ends of
    text that they may not have where it is bound.
    """

    phases: Sequence[Callable[[], Phase]] = ()
    again: int | None = None
    bound: bool = False
    unthinkable: frozenset[int] = frozenset()


def constraint(
    request: ChatRequest, prompt: Prompt, tokenizer: ChatTokenizer, grammars: GrammarCompiler
) -> Matcher | None:
    """The matcher of a whole answer, None where everything may come. Raises InvalidRequest.

    Compiling a grammar may take some tenths of a second: not for an event loop.
    """
    size, ends = tokenizer.vocab_size, tokenizer.eos_ids
    plan, budget = _content(request, tokenizer, grammars), request.thinking_budget
    if not prompt.in_reasoning or not (plan.phases or budget is not None):
        return Phases(ends, plan.phases, plan.again) if plan.phases else None
    end = tokenizer.literal_id(END_THINK)
    if end is None:
        raise InvalidRequest(
            f"This model's tokenizer has no {END_THINK}, so that no rule can be kept behind or about its thoughts.",
            param="chat_template_kwargs",
        )
    if not plan.phases:
        return Phases(ends, [partial(Free, size, end, budget, on=True)])
    banned = plan.unthinkable | (ends if plan.bound else frozenset())
    before: list[Callable[[], Phase]] = [partial(Free, size, end, budget, banned)]
    if plan.bound:
        before.append(partial(Fixed, size, tokenizer.plain(_AFTER_THOUGHTS)))
    return Phases(ends, [*before, *plan.phases], None if plan.again is None else len(before) + plan.again)


def _content(request: ChatRequest, tokenizer: ChatTokenizer, grammars: GrammarCompiler) -> _Plan:
    """Of what follows the thoughts; without phases where that is free."""
    size, many, tools = tokenizer.vocab_size, request.parallel_tool_calls, _callable(request)
    begin, end = tokenizer.literal_id(BEGIN_CALL), tokenizer.literal_id(END_CALL)
    if request.tool_choice == "required":
        return _Plan([grammars.calls(tools, many=many).fresh], bound=True)
    if request.sampling.grammar:
        grammar = grammars.matcher(request.sampling.grammar)
        if not tools or begin is None or request.sampling.grammar.kind not in _SHAPES:
            return _Plan([grammar.fresh], bound=True)
        calls = grammars.calls(tools, many=many)
        # A call among the thoughts would be one by no grammar.
        return _Plan(
            [lambda: Either(grammar.fresh(), calls.fresh(), begin)], bound=True, unthinkable=frozenset({begin})
        )
    if not tools or begin is None or end is None:
        return _Plan()
    if any(tool["function"].get("strict") is True for tool in tools):
        call = grammars.calls(tools, many=False, begun=True)
        return _Plan([partial(Free, size, begin), call.fresh], again=0 if many else None)
    return _Plan() if many else _Plan([partial(Free, size, end)])


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
