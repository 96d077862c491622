"""Tags in a text that arrives in pieces: the first one, or the end of the text that may yet become one.

Knows patterns; must never know what a tag means.
"""

from __future__ import annotations

import re

LONGEST_NAME = 1024
NAME = rf"[^<>\s][^<>\n]{{0,{LONGEST_NAME - 1}}}"
SPACE = r"\s*"


def tags(**sequences: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern whose first match in a text is either a tag, `lastgroup` being its name, or what may become one.

    The latter reaches to the end of the text and has no `lastgroup`: whether a tag stands there only further text
    tells. A sequence is of `NAME`, `SPACE`, `"\\n?"` and literals; none may begin another.
    """
    return re.compile("|".join(_sequence(name, parts) for name, parts in sequences.items()))


def _sequence(name: str, parts: tuple[str, ...]) -> str:
    units = [
        unit
        for part in parts
        for unit in ([part] if part in (NAME, SPACE, r"\n?") else [re.escape(char) for char in part])
    ]
    pattern = f"(?P<{name}>)"
    for unit in reversed(units):
        pattern = rf"{unit}(?:{pattern}|\Z)"
    return pattern
