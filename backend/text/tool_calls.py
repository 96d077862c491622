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
from backend.text.markup import LONGEST_NAME, NAME, SPACE, tags
from backend.text.tool_schemas import TEXT, Types, as_json, parameter_types, strict_json

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


@dataclass
class _Call:
    index: int | None  # None: one too many, told to nobody
    id: str
    name: str
    types: Mapping[str, Types]
    keys: set[str] = field(default_factory=set)
    arguments: list[str] = field(default_factory=list)


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
        self._told: list[_Call] = []
        self._call: _Call | None = None
        self._called = False
        self._blank = ""  # white space that is content if more follows it
        self._skips_blank = False  # there was white space before the last call: what comes after it adds nothing
        self._spoken = False
        self._value: list[str] | None = None  # a parameter's text, where it is not told bit by bit
        self._value_types = TEXT
        self._key = ""
        self._repeated = False  # the parameter had a value before
        self._json: list[str] = []
        self._new_content: list[str] = []
        self._new_calls: list[ToolCallDelta] = []

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Every call so far."""
        return tuple(ToolCall(call.id, call.name, "".join(call.arguments)) for call in self._told)

    def push(self, text: str) -> Parsed:
        """What `text` makes certain."""
        self._held += text
        self._read_on()
        return self._news()

    def finish(self, *, cut: bool) -> Parsed:
        """The rest, once no text follows. `cut`: the model had not ended, so an unfinished call stays unfinished."""
        if self._read == self._json_call:
            block, self._held = "".join(self._json) + self._held, ""
            if not self._take_json(block) and not cut:
                self._held = block
                self._read_on()
        if self._read == self._content:
            if not self._called:
                self._say(self._held)
        elif self._call is not None and not cut:
            if self._read != self._function:
                self._end_value()
            self._end_call()
        if not self._called:
            self._new_content.append(self._blank)
        self._blank = ""
        return self._news()

    def _news(self) -> Parsed:
        news = Parsed("".join(self._new_content), tuple(self._new_calls))
        self._new_content, self._new_calls = [], []
        return news

    def _read_on(self) -> None:
        while self._read():
            pass

    # Each of these reads what it can of the text held; False where it needs more.

    def _content(self) -> bool:
        before, tag, name = self._next(_IN_CONTENT)
        self._say(before)
        if name == "call":
            self._read = self._opened
        elif name == "function":
            if (function := _name(tag)) in self._types:
                self._begin_call(function)
            else:
                self._say(tag)
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
            self._say(_FUNCTION + name)
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
            self._begin_value(_name(tag))
        elif name is not None:
            self._end_call()
            if name == "function":
                self._begin_call(_name(tag))
            else:
                self._read = self._opened if name == "call" else self._content
        return name is not None

    def _value_start(self) -> bool:
        if not self._held:
            return False
        self._held = self._held.removeprefix("\n")
        self._read = self._value_text
        return True

    def _value_text(self) -> bool:
        before, tag, name = self._next(_IN_VALUE)
        self._add_to_value(before)
        if name is None:
            return False
        if name == "parameter" and not self._expects(_name(tag)):
            self._add_to_value(tag)
            return True
        self._held = tag.removeprefix("\n").removeprefix(_PARAMETER_END) + self._held
        self._end_value()
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

    # What was read becomes content and calls.

    def _say(self, text: str) -> None:
        if self._skips_blank:
            text = text.lstrip()
            self._skips_blank = not text
        self._blank += text
        if certain := self._blank.rstrip():
            self._blank = self._blank[len(certain) :]
            self._new_content.append(certain.lstrip() if self._called and not self._spoken else certain)
            self._spoken = True

    def _begin_call(self, name: str) -> None:
        index = len(self._told) if self._parallel or not self._told else None
        self._call = _Call(index, f"call_{secrets.token_hex(12)}", name, self._types.get(name, {}))
        self._called = True
        self._skips_blank = bool(self._blank)
        self._read = self._function
        if index is not None:
            self._told.append(self._call)
            self._new_calls.append(ToolCallDelta(index, id=self._call.id, name=name))

    def _end_call(self) -> None:
        self._argue("}" if self._call and self._call.arguments else "{}")
        self._call = None

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
        self._argue(spelled)
        self._call = None
        self._read = self._content
        return True

    def _expects(self, key: str) -> bool:
        assert self._call is not None
        return key not in self._call.keys and (not self._call.types or key in self._call.types)

    def _begin_value(self, key: str) -> None:
        assert self._call is not None
        self._read = self._value_start
        self._repeated = key in self._call.keys
        self._value_types = self._call.types.get(key, TEXT)
        self._value = None if self._value_types == TEXT else []
        if not self._repeated:
            self._call.keys.add(key)
            self._key = json.dumps(key, ensure_ascii=False)
            if self._value is None:
                self._argue_key()
                self._argue('"')

    def _add_to_value(self, text: str) -> None:
        if self._value is not None:
            self._value.append(text)
        elif text and not self._repeated:
            self._argue(json.dumps(text, ensure_ascii=False)[1:-1])

    def _end_value(self) -> None:
        if self._repeated:
            return
        if self._value is None:
            self._argue('"')
        else:
            self._argue_key()
            self._argue(as_json("".join(self._value), self._value_types))

    def _argue_key(self) -> None:
        assert self._call is not None
        self._argue(f"{', ' if self._call.arguments else '{'}{self._key}: ")

    def _argue(self, piece: str) -> None:
        assert self._call is not None
        self._call.arguments.append(piece)
        if (index := self._call.index) is None:
            return
        if self._new_calls and self._new_calls[-1].index == index:
            last = self._new_calls.pop()
            self._new_calls.append(replace(last, arguments=last.arguments + piece))
        else:
            self._new_calls.append(ToolCallDelta(index, arguments=piece))


def _name(tag: str) -> str:
    return tag.partition("=")[2].removesuffix(">").strip()
