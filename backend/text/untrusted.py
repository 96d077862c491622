"""Client strings on their way through a chat template: what reads as a special token is hidden before, shown after.

Knows JSON-like values and the special-token literals; must never know a tokenizer or what a message is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from backend.interface import InvalidRequest

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")


def literal_pattern(literals: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of `literals`, the longest first where one begins another; one group around it."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(literals, key=len, reverse=True))) or '(?!)'})")


class Quarantine:
    """Stands private-use characters, found in no string given, for everything that could become a literal.

    Hidden are whole literals, and a string's end or start that begins or ends one: a template that writes
    `'<function=' + name + '>'` would otherwise complete the `<|im_end|` of a client's name. (A template that spells a
    literal around a client's string, as `'<|' + role + '|>'`, means to.)
    """

    def __init__(self, literals: Iterable[str], *given: Any) -> None:
        """`given`: every string or JSON-like value that will meet the hidden ones, the template's text included."""
        names = list(literals)
        self._whole = literal_pattern(names)
        self._heads = frozenset(name[:cut] for name in names for cut in range(1, len(name)))
        self._tails = frozenset(name[cut:] for name in names for cut in range(1, len(name)))
        self._reach = max(map(len, names), default=1) - 1
        taken = {char for text in strings([names, given]) for char in _PRIVATE.findall(text)}
        self._free = (char for char in map(chr, chain(*_PRIVATE_USE)) if char not in taken)
        self._stand_ins: dict[str, str] = {}

    def hide(self, value: Any) -> Any:
        """`value` with every string in it, keys included, made harmless; other scalars as they are."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def reveal(self, text: str) -> str:
        """`text` with what was hidden back in its place."""
        return text.translate({ord(stand_in): hidden for hidden, stand_in in self._stand_ins.items()})

    def stand_in(self, hidden: str) -> str:
        """One character that is `hidden` again once revealed; what a template trims or looks for, it leaves alone."""
        if hidden not in self._stand_ins:
            char = next(self._free, None)
            if char is None:
                raise InvalidRequest("the messages use every private-use character of Unicode", param="messages")
            self._stand_ins[hidden] = char
        return self._stand_ins[hidden]

    def _hide_text(self, text: str) -> str:
        text = self._whole.sub(lambda match: self.stand_in(match[0]), text)
        # The edges are looked for inside surrounding white space, because templates trim.
        end = len(text.rstrip())
        for length in range(min(self._reach, end), 0, -1):
            if (head := text[end - length : end]) in self._heads:
                text = text[: end - length] + self.stand_in(head) + text[end:]
                break
        start = len(text) - len(text.lstrip())
        for length in range(min(self._reach, len(text) - start), 0, -1):
            if (tail := text[start : start + length]) in self._tails:
                return text[:start] + self.stand_in(tail) + text[start + length :]
        return text


def strings(value: Any) -> Iterator[str]:
    """Every string of a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def require_text(value: Any, param: str) -> None:
    """Raise InvalidRequest where a string of `value` holds a lone surrogate, which JSON can spell and UTF-8 cannot."""
    for text in strings(value):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = f"U+{ord(text[error.start]):04X}"
            raise InvalidRequest(f"{param} holds a lone surrogate ({code}), which is not text", param=param) from None
