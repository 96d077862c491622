"""The reader of server-sent events: whatever pieces the bytes come in, the events are the same."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.upstream.events import EventReader, EventTooLong

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are shared
LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
DATA = st.lists(st.binary(max_size=12).filter(lambda line: b"\n" not in line and b"\r" not in line), min_size=1)


def read(pieces: list[bytes], limit: int = 10**6) -> list[bytes]:
    reader = EventReader(limit)
    return [event for piece in pieces for event in reader.feed(piece)] + reader.finish()


@PATIENT
@given(st.lists(DATA, max_size=4), LINE_ENDS, st.data())
def test_events_do_not_depend_on_the_pieces_they_arrive_in(events, end, data):
    text = b"".join(b": hello" + end + b"".join(b"data: " + line + end for line in lines) + end for lines in events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces) == [b"\n".join(lines) for lines in events] == read([bytes([byte]) for byte in text])


@PATIENT
@given(st.lists(st.binary(max_size=30)))
def test_no_bytes_are_too_odd_to_read(pieces):
    assert read(pieces) == read([b"".join(pieces)])


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (b"data:x\n\n", [b"x"]),
        (b"data:  x\n\n", [b" x"]),
        (b"data\n\n", [b""]),
        (b"\xef\xbb\xbfdata: x\n\n", [b"x"]),
        (b"event: message\nid: 7\nretry: 10\n: a comment\ndata: x\n\n", [b"x"]),
        (b"event: nothing\n\n\n\n", []),
        (b"data: cut off", [b"cut off"]),
        (b"data: [DONE]\n", [b"[DONE]"]),
        (b'error: {"message":"no"}\n\n', [b'{"error": {"message":"no"}}']),
        ("data: a\u2028b\x85\x0b\n\n".encode(), ["a\u2028b\x85\x0b".encode()]),
    ],
)
def test_fields_are_read_as_the_format_has_them(text, events):
    assert read([text]) == events


@pytest.mark.parametrize("line_end", [b"", b"\n"])
def test_an_event_has_a_greatest_size(line_end):
    piece = b"data: " + b"x" * 94 + line_end
    assert read([piece], 1000)
    with pytest.raises(EventTooLong):
        read([piece] * 20, 1000)
