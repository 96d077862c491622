"""The arguments of one tool call as JSON, told piece by piece while its parameters come.

Knows types and values; must never know the markup they come in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from backend.text.tool_schemas import TEXT, Types, as_json


class Arguments:
    """Joined, what its methods return is a JSON object once `end` has been called.

    Text is told as it comes, other values when they are whole. Of two values of one parameter the first counts.
    """

    def __init__(self, types: Mapping[str, Types]) -> None:
        """`types`: of the parameters the function has; others are text."""
        self._types = types
        self._seen: set[str] = set()
        self._begun = self._repeated = False  # a value; and it is not the first of its parameter
        self._key, self._value_types = "", TEXT
        self._value: list[str] | None = None  # where it is not told as it comes

    def expects(self, key: str) -> bool:
        """This could be the next parameter."""
        return key not in self._seen and (not self._types or key in self._types)

    def begin_value(self, key: str) -> str:
        self._begun, self._repeated = True, key in self._seen
        if self._repeated:
            return ""
        separator = ", " if self._seen else "{"
        self._seen.add(key)
        self._key = f"{separator}{json.dumps(key, ensure_ascii=False)}: "
        self._value_types = self._types.get(key, TEXT)
        self._value = None if self._value_types == TEXT else []
        return f'{self._key}"' if self._value is None else ""

    def add(self, text: str) -> str:
        """`text` goes on with the value that was begun."""
        if self._repeated:
            return ""
        if self._value is not None:
            self._value.append(text)
            return ""
        return json.dumps(text, ensure_ascii=False)[1:-1]

    def end_value(self) -> str:
        self._begun = False
        if self._repeated:
            return ""
        return '"' if self._value is None else self._key + as_json("".join(self._value), self._value_types)

    def end(self) -> str:
        """No more parameters; a value that was begun has ended too."""
        last = self.end_value() if self._begun else ""
        return last + ("}" if self._seen else "{}")
