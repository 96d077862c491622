"""The data of server-sent events, out of bytes that arrive in any pieces.

Knows the format's lines and nothing of what events carry.
"""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLong(Exception):
    """An event larger than anybody would send on purpose."""


class EventReader:
    """`feed` it what arrives; `finish` it at the end, for a last event that no empty line closed."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._line = bytearray()  # of which the end has not arrived
        self._after_return = False  # a line feed would belong to the line end before it
        self._first = True
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that the piece completes. Raises EventTooLong."""
        if not piece:
            return []
        if self._after_return and piece[:1] == b"\n":
            piece = piece[1:]
        self._after_return = piece[-1:] == b"\r"
        events: list[bytes] = []
        *ended, rest = _LINE_END.split(piece)
        for line in ended:
            self._line += line
            self._end_line(events)
        self._line += rest
        if self._size + len(self._line) > self._most_bytes:
            raise EventTooLong
        return events

    def finish(self) -> list[bytes]:
        """The data of an event that was cut off, whole or not, if there is one."""
        events: list[bytes] = []
        self._end_line(events)
        if self._data:
            self._end_line(events)
        return events

    def _end_line(self, events: list[bytes]) -> None:
        line = bytes(self._line)
        self._line.clear()
        if self._first:
            self._first = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if line:
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
            elif field == b"error":  # llama.cpp before it put its errors into data
                self._data.append(b'{"error":' + value + b"}")
            self._size = sum(map(len, self._data))
        elif self._data:
            events.append(b"\n".join(self._data))
            self._data.clear()
            self._size = 0
