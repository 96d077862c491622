"""Tool calls told apart from an answer's content while it arrives, in Qwen3.5's markup.

Runs on the event loop, behind the reasoning; must never know tokens.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from backend.interface import ToolCall, ToolCallDelta
from backend.text.call_arguments import Arguments
from backend.text.markup import LONGEST_NAME, NAME, SPACE, tags
from backend.text.tool_schemas import parameter_types, strict_json

_CALL, _CALL_END, _END_THINK = "<tool_call>", "</tool_call>", "</think>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"

_IN_CONTENT = tags(call=(_CALL,), call_end=(_CALL_END,), end_think=(_END_THINK,), function=(_FUNCTION, NAME, ">"))
_IN_FUNCTION = tags(
    parameter=(_PARAMETER, NAME, ">"),
    function_end=(_FUNCTION_END,),
    call_end=(_CALL_END,),
    call=(_CALL,),
    function=(_FUNCTION, NAME, ">"),
)
_AFTER_VALUE = (_PARAMETER, _FUNCTION_END, _CALL_END, _FUNCTION, _CALL)
# A value may be about this markup: what ends it is what could follow a value.
_IN_VALUE = tags(
    **{f"end_{at}": (r"\n?", _PARAMETER_END, SPACE, follower) for at, follower in enumerate(_AFTER_VALUE)},
    function_end=(r"\n?", _FUNCTION_END, SPACE, _CALL_END),
    call_end=(r"\n?", _CALL_END, SPACE, _CALL),
    parameter=("\n", _PARAMETER, NAME, ">"),
)
_NO_NAME = re.compile(r"[<>\n]")
_IN_JSON = tags(call_end=(_CALL_END,), call=(_CALL,))


@dataclass(frozen=True)
class Parsed:
    """Content to append to the answer, and what to append to its calls."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()

    def __add__(self, more: Parsed) -> Parsed:
        return Parsed(self.content + more.content, self.calls + more.calls)


class ToolCallParser:
    """Joined, what it tells is the same whatever the pieces a text comes in.

    A call is `<tool_call>` with `<function=NAME>` and its parameters in it, or with JSON of a name and arguments. Left
    out may be the closing tags where what follows makes up for them, and `<tool_call>` before a function that is one
    of the tools. A parameter's value loses one newline at either end and becomes JSON of its type by the tool's schema;
    without a type it is text. Of two parameters with one name the first counts. What is no call is content, without
    the tags; white space next to a call belongs to neither.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool = True) -> None:
        """`parallel` False: calls after the first are left out."""
        self._types = parameter_types(tools)
        self._parallel = parallel
        self._held = ""  # text not understood yet
        self._read: Callable[[], bool] = self._content
        self._prose = _Prose()
        self._told: list[_Call] = []
        self._call: _Call | None = None
        self._json: list[str] = []
        self._news: list[ToolCallDelta] = []

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Every call so far."""
        return tuple(ToolCall(call.id, call.name, "".join(call.told)) for call in self._told)

    def push(self, text: str) -> Parsed:
        """What `text` makes certain."""
        self._held += text
        while self._read():
            pass
        calls, self._news = tuple(self._news), []
        return Parsed(self._prose.take(), calls)

    def finish(self, *, cut: bool) -> Parsed:
        """The rest, once no text follows. `cut`: the model had not ended, so an unfinished call stays unfinished."""
        before = Parsed()
        if self._read == self._json_call:
            block, self._held = "".join(self._json) + self._held, ""
            if not self._take_json(block) and not cut:
                before = self.push(block)
        if self._read == self._content:
            self._prose.finish(self._held)
        elif self._call is not None and not cut:
            self._tell(self._call.arguments.end())
        self._held = ""
        return before + self.push("")

    # Each of these reads what it can of the text held; False where it needs more.

    def _content(self) -> bool:
        before, tag, name = self._next(_IN_CONTENT)
        self._prose.say(before)
        if name == "call":
            self._read = self._opened
        elif name == "function":
            if (function := _name(tag)) in self._types:
                self._begin_call(function)
            else:
                self._prose.say(tag)
        return name is not None

    def _opened(self) -> bool:
        """After `<tool_call>`."""
        self._held = self._held.lstrip()
        if self._held.startswith(_FUNCTION):
            self._held = self._held[len(_FUNCTION) :]
            self._read = self._function_name
        elif self._held.startswith("{"):
            self._json = []
            self._read = self._json_call
        elif _FUNCTION.startswith(self._held):
            return False
        else:
            self._read = self._content
        return True

    def _function_name(self) -> bool:
        end = _NO_NAME.search(self._held)
        if end is None and len(self._held) <= LONGEST_NAME:
            return False
        at = LONGEST_NAME if end is None else min(end.start(), LONGEST_NAME)
        name, self._held = self._held[:at], self._held[at:]
        if self._held.startswith(">") and name.strip():
            self._held = self._held[1:]
            self._begin_call(name.strip())
        else:
            self._prose.say(_FUNCTION + name)
            self._read = self._content
        return True

    def _json_call(self) -> bool:
        before, tag, name = self._next(_IN_JSON)
        self._json.append(before)
        if name is not None:
            block = "".join(self._json)
            self._held = tag + self._held if self._take_json(block) else block + tag + self._held
        return name is not None

    def _function(self) -> bool:
        """Between parameters, where nothing else means anything."""
        _, tag, name = self._next(_IN_FUNCTION)
        if name == "parameter":
            self._tell(self._current.arguments.begin_value(_name(tag)))
            self._read = self._value_start
        elif name is not None:
            self._end_call()
            if name == "function":
                self._begin_call(_name(tag))
            elif name == "call":
                self._read = self._opened
        return name is not None

    def _value_start(self) -> bool:
        if not self._held:
            return False
        self._held = self._held.removeprefix("\n")
        self._read = self._value_text
        return True

    def _value_text(self) -> bool:
        before, tag, name = self._next(_IN_VALUE)
        arguments = self._current.arguments
        self._tell(arguments.add(before))
        if name is None:
            return False
        if name == "parameter" and not arguments.expects(_name(tag)):
            self._tell(arguments.add(tag))
            return True
        self._held = tag.removeprefix("\n").removeprefix(_PARAMETER_END) + self._held
        self._tell(arguments.end_value())
        self._read = self._function
        return True

    def _next(self, pattern: re.Pattern[str]) -> tuple[str, str, str | None]:
        """The text before the first tag, the tag and its name; no name where it has not come (whole) yet."""
        found = pattern.search(self._held)
        if found is None:
            before, self._held = self._held, ""
            return before, "", None
        before = self._held[: found.start()]
        self._held = self._held[found.end() if found.lastgroup else found.start() :]
        return before, found[0], found.lastgroup

    # What was read becomes calls.

    def _begin_call(self, name: str) -> None:
        wanted = self._parallel or not self._told
        arguments = Arguments(self._types.get(name, {}))
        self._call = _Call(len(self._told) if wanted else None, f"call_{secrets.token_hex(12)}", name, arguments)
        self._prose.interrupt()
        self._read = self._function
        if self._call.index is not None:
            self._told.append(self._call)
            self._news.append(ToolCallDelta(self._call.index, id=self._call.id, name=name))

    def _end_call(self) -> None:
        self._tell(self._current.arguments.end())
        self._call = None
        self._read = self._content

    def _take_json(self, block: str) -> bool:
        """Tell a call spelled as JSON; False where it is none, and so may be content."""
        self._read = self._content
        try:
            call = strict_json(block)
            name, arguments = (call.get("name"), call.get("arguments")) if isinstance(call, dict) else (None, None)
            if isinstance(arguments, str):
                arguments = strict_json(arguments or "{}")
            spelled = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
            spelled.encode()
        except ValueError:  # also of a number too large or a lone surrogate
            return False
        if not (isinstance(name, str) and name and name.isprintable() and spelled.startswith("{")):
            return False
        self._begin_call(name)
        self._tell(spelled)
        self._call = None
        self._read = self._content
        return True

    @property
    def _current(self) -> _Call:
        assert self._call is not None
        return self._call

    def _tell(self, arguments: str) -> None:
        self._current.told.append(arguments)
        if (index := self._current.index) is None or not arguments:
            return
        if self._news and self._news[-1].index == index:
            last = self._news.pop()
            self._news.append(replace(last, arguments=last.arguments + arguments))
        else:
            self._news.append(ToolCallDelta(index, arguments))


@dataclass
class _Call:
    index: int | None  # None: one too many, told to nobody
    id: str
    name: str
    arguments: Arguments
    told: list[str] = field(default_factory=list)


class _Prose:
    """The content around calls, without the white space next to them where nothing else stands on that side."""

    def __init__(self) -> None:
        self._blank = ""  # content if more follows it
        self._called = self._spoken = False
        self._skips_blank = False  # there was white space before the last call: what comes after it adds nothing
        self._new: list[str] = []

    def say(self, text: str) -> None:
        if self._skips_blank:
            text = text.lstrip()
            self._skips_blank = not text
        self._blank += text
        if certain := self._blank.rstrip():
            self._blank = self._blank[len(certain) :]
            self._new.append(certain.lstrip() if self._called and not self._spoken else certain)
            self._spoken = True

    def interrupt(self) -> None:
        """By a call."""
        self._called, self._skips_blank = True, bool(self._blank)

    def finish(self, rest: str) -> None:
        """`rest` might have become a tag; behind a call it is none of the content."""
        if not self._called:
            self.say(rest)
            self._new.append(self._blank)
            self._blank = ""

    def take(self) -> str:
        """What is new since the last time."""
        new, self._new = "".join(self._new), []
        return new


def _name(tag: str) -> str:
    return tag.partition("=")[2].removesuffix(">").strip()
