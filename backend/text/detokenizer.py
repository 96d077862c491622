"""Token ids to text, one at a time, never half a character.

Knows bytes; must never know a vocabulary, a stop string or reasoning.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable


class Detokenizer:
    """What it returns, joined, is `b"".join(map(text_bytes, ids)).decode("utf-8", errors="replace")`."""

    def __init__(self, text_bytes: Callable[[int], bytes]) -> None:
        """`text_bytes`: the bytes an id adds to the text, such as `ChatTokenizer.text_bytes`."""
        self._text_bytes = text_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters this id completes; may be empty."""
        return self._decoder.decode(self._text_bytes(token_id))

    def flush(self) -> str:
        """The end of the text: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)
