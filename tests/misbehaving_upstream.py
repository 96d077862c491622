"""An OpenAI server that says exactly what a test tells it to, down to the byte, and breaks off as it is told to.

Knows sockets alone: no framework stands between a script and the wire.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

MODELS = {"object": "list", "data": [{"id": "far", "object": "model", "owned_by": "them", "max_model_len": 777}]}
CREATED = 1700000000


@dataclass(frozen=True)
class Script:
    """An answer: `steps` are bytes to send and seconds to wait, `end` what happens then.

    chunked without `end="whole"` lacks the last chunk; hang waits until the proxy leaves.
    """

    steps: Sequence[bytes | float] = ()
    status: int = 200
    content_type: str = "text/event-stream; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)
    framing: Literal["close", "chunked"] = "close"
    end: Literal["whole", "fin", "rst", "hang"] = "whole"


@dataclass
class Seen:
    """A request as it arrived. `left`: the proxy closed the connection before the script was over.

    `heard`, set by a test: the client has what was sent, so that a reset need not wait for longer.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any
    left: threading.Event = field(default_factory=threading.Event)
    heard: threading.Event = field(default_factory=threading.Event)


class Upstream:
    """`answer` decides on every POST; `gets` are the bodies of GETs by path, text or JSON."""

    def __init__(self) -> None:
        self.url = ""
        self.reset()

    def reset(self) -> None:
        """Forget what was, and do nothing wrong."""
        self.answer: Callable[[Seen], Script] = lambda seen: whole(seen, "Hello")
        self.gets: dict[str, Any] = {"/v1/models": MODELS}
        self.posts: list[Seen] = []
        self.looks: list[Seen] = []
        self.connections = 0

    def say(self, *scripts: Script) -> None:
        """Answer with these, one after the other, the last one again and again."""
        left = list(scripts)
        self.answer = lambda _: left.pop(0) if len(left) > 1 else left[0]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while (seen := await _request(reader)) is not None:
                if seen.method == "GET":
                    self.looks.append(seen)
                    await self._get(seen, writer)
                    continue
                self.posts.append(seen)
                script = self.answer(seen)
                await _play(script, seen, reader, writer)
                if script.framing != "chunked" or script.end != "whole":
                    break
        writer.close()

    async def _get(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        told = self.gets.get(seen.path)
        data = told.encode() if isinstance(told, str) else json.dumps(told or {"error": "no such page"}).encode()
        status = 200 if told is not None else 404
        kind = "text/plain" if isinstance(told, str) else "application/json"
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()


async def _request(reader: asyncio.StreamReader) -> Seen | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.rstrip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Seen(method, path, headers, json.loads(body) if body else None)


async def _play(script: Script, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = f"HTTP/1.1 {script.status} X\r\nContent-Type: {script.content_type}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in script.headers.items())
    head += "Transfer-Encoding: chunked\r\n\r\n" if script.framing == "chunked" else "Connection: close\r\n\r\n"
    leaving = asyncio.create_task(_watch(seen, reader))
    try:
        # A script that hangs at once has not even sent its head.
        if script.steps or script.end != "hang":
            writer.write(head.encode())
        for step in script.steps:
            if isinstance(step, float):
                await asyncio.wait({leaving}, timeout=step)
            elif script.framing == "chunked":
                writer.write(b"%x\r\n%s\r\n" % (len(step), step))
            else:
                writer.write(step)
            await writer.drain()
        if script.end == "hang":
            await asyncio.wait({leaving})
        elif script.end == "rst":
            # A reset overtakes what has not been read yet.
            for _ in range(200 if script.steps else 0):
                if seen.heard.is_set():
                    break
                await asyncio.sleep(0.01)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        elif script.framing == "chunked" and script.end == "whole":
            writer.write(b"0\r\n\r\n")
            await writer.drain()
    except ConnectionError:
        seen.left.set()
        raise
    finally:
        leaving.cancel()


async def _watch(seen: Seen, reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        await reader.read(1)
    seen.left.set()


@contextmanager
def misbehaving() -> Iterator[Upstream]:
    """A running upstream, at `url`."""
    upstream = Upstream()
    started, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
        upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        loops.append(asyncio.get_running_loop())
        started.set()
        await stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    started.wait()
    try:
        yield upstream
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(10)


def chunk(content: str | None = None, finish: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    """A chunk of a streamed chat, with a field that nobody knows."""
    delta = {} if content is None else {"content": content}
    choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}
    head = {"id": "chatcmpl-theirs", "object": "chat.completion.chunk", "created": CREATED, "model": "far"}
    return {**head, "x_theirs": {"deep": [1, 2.5, None]}, "choices": [choice], **more}


def usage(prompt: int = 5, completion: int = 2) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def last_usage(**more: Any) -> dict[str, Any]:
    """The chunk after the last one, which a client has to ask for."""
    return {**chunk(), "choices": [], "usage": usage(), **more}


def events(*chunks: Any, done: bool = True) -> bytes:
    """Chunks as server-sent events."""
    lines = [f"data: {json.dumps(one, ensure_ascii=False)}\n\n" for one in chunks]
    return "".join([*lines, "data: [DONE]\n\n"] if done else lines).encode()


def stream(*chunks: Any, **how: Any) -> Script:
    return Script(steps=(events(*chunks),), **how)


def plain(body: Any, status: int = 200, **how: Any) -> Script:
    """An answer in one piece; text as it is, anything else as JSON."""
    text = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
    return Script((text.encode(),), status, "application/json" if text != body else "text/html", **how)


def completion(content: str = "Hello", **more: Any) -> dict[str, Any]:
    """A whole chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    head = {"id": "chatcmpl-theirs", "object": "chat.completion", "created": CREATED, "model": "far", "x_theirs": 1}
    return {**head, "choices": [choice], "usage": usage(), **more}


def whole(seen: Seen, content: str) -> Script:
    """An upstream that does nothing wrong."""
    if not seen.body.get("stream"):
        return plain(completion(content))
    asked = (seen.body.get("stream_options") or {}).get("include_usage")
    chunks = [chunk(content), chunk(finish="stop")]
    if asked:
        chunks = [one | {"usage": None} for one in chunks] + [last_usage()]
    return stream(*chunks)
