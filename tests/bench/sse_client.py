"""Many SSE streams over raw sockets, read as cheaply as Python can: the clients of tests.bench.gateway.

python -m tests.bench.sse_client --ports 8000 --pids 123 --streams 64 --seconds 5

Opens the streams, waits until each has its first token, reads for some seconds, and prints one JSON
object. It counts characters as tokens: the models that it is used with have a token per byte. Bytes
are kept with their time and looked into only afterwards.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.bench.proc import cpu_s

_FIRST_WITHIN_S = 60.0


@dataclass
class Stream:
    """One connection: when it asked, and what came when."""

    socket: socket.socket
    asked: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    def chunks(self) -> list[tuple[float, int]]:
        """(when, characters) of every event with text. An event that two reads share came with the second."""
        found, rest = [], b""
        for when, data in self.pieces:
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                start = event.find(b'{"id"')
                if start < 0:
                    continue
                choices = json.loads(event[start:])["choices"]
                text = choices[0]["delta"].get("content", "") if choices else ""
                if text:
                    found.append((when, len(text)))
        return found


def request(path: str, body: dict[str, Any]) -> bytes:
    """An HTTP request with a JSON body."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def _chat(text: str, max_tokens: int, *, stream: bool) -> bytes:
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": stream}
    return request("/v1/chat/completions", body)


class Clients:
    """The streams, and now and then a large body beside them."""

    def __init__(self, ports: list[int], streams: int, tokens: int) -> None:
        self._ports = ports
        self._selector = selectors.DefaultSelector()
        self.streams: list[Stream] = []
        self._body_bytes = 0
        self._between_s = 0.0
        self._due = float("inf")
        self._bodies: set[socket.socket] = set()
        self.bodies_done = 0
        data = _chat("Why is the sky blue?", tokens, stream=True)
        for number in range(streams):
            connection = socket.create_connection(("127.0.0.1", ports[number % len(ports)]))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = Stream(connection, time.perf_counter())
            connection.sendall(data)
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, stream)
            self.streams.append(stream)

    def send_bodies(self, size: int, per_s: float) -> None:
        """From now on chats with a body of `size` bytes come beside the streams."""
        self._body_bytes, self._between_s, self._due = size, 1 / per_s, time.perf_counter()

    def read_until(self, end: float, *, first_only: bool = False) -> None:
        """Reads until then, or until every stream has sent text."""
        silent = set(range(len(self.streams))) if first_only else set()
        numbers = {stream.socket: number for number, stream in enumerate(self.streams)} if first_only else {}
        while (now := time.perf_counter()) < end and (silent or not first_only):
            if now >= self._due:
                self._send_body()
            for key, _ in self._selector.select(min(end, self._due) - now):
                data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                if key.data is None:
                    self._take_answer(key.fileobj, data)  # type: ignore[arg-type]
                    continue
                if not data:
                    raise SystemExit("a stream ended before the time was over")
                key.data.pieces.append((time.perf_counter(), data))
                if first_only and key.data.chunks():
                    silent.discard(numbers[key.data.socket])
        if silent:
            raise SystemExit(f"{len(silent)} of {len(self.streams)} streams have no token yet")

    def _send_body(self) -> None:
        self._due += self._between_s
        connection = socket.create_connection(("127.0.0.1", self._ports[0]))
        connection.sendall(_chat("wave " * (self._body_bytes // 5), 1, stream=False))
        self._selector.register(connection, selectors.EVENT_READ, None)
        self._bodies.add(connection)

    def _take_answer(self, connection: socket.socket, data: bytes) -> None:
        if data and b" 200 OK" not in data[:20]:
            raise SystemExit(f"a large body was answered with {data[:400]!r}")
        self.bodies_done += 1
        self._selector.unregister(connection)
        connection.close()


def main() -> int:
    """Prints the figures of one run."""
    parser = argparse.ArgumentParser(prog="tests.bench.sse_client", description=__doc__)
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    parser.add_argument("--pids", type=int, nargs="+", required=True)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--body-bytes", type=int, default=0)
    parser.add_argument("--bodies-per-s", type=float, default=4.0)
    given = parser.parse_args()
    clients = Clients(given.ports, given.streams, given.tokens)
    clients.read_until(time.perf_counter() + _FIRST_WITHIN_S, first_only=True)
    clients.read_until(time.perf_counter() + 0.5)
    if given.body_bytes:
        clients.send_bodies(given.body_bytes, given.bodies_per_s)
    begin, used = time.perf_counter(), [cpu_s(pid) for pid in given.pids]
    clients.read_until(begin + given.seconds)
    end, used = time.perf_counter(), [cpu_s(pid) - before for pid, before in zip(given.pids, used, strict=True)]
    chunks = [stream.chunks() for stream in clients.streams]
    inside = [[chunk for chunk in own if begin <= chunk[0] <= end] for own in chunks]
    tokens = sum(characters for own in inside for _, characters in own)
    gaps = sorted((after[0] - before[0]) * 1e3 for own in inside for before, after in pairwise(own))
    ttft = [(own[0][0] - stream.asked) * 1e3 for own, stream in zip(chunks, clients.streams, strict=True)]
    figures = {
        "tokens_per_s": round(tokens / (end - begin)),
        "cpu_us_per_token": round(sum(used) * 1e6 / max(1, tokens), 1),
        "cpu_percent": [round(seconds / (end - begin) * 100) for seconds in used],
        "tokens_per_chunk": round(tokens / max(1, sum(map(len, inside))), 3),
        "ttft_ms": round(statistics.median(ttft), 1),
        "gap_ms": round(statistics.median(gaps), 2),
        "gap_p99_ms": round(gaps[int(len(gaps) * 0.99)], 2),
        "gap_max_ms": round(gaps[-1], 2),
        "bodies": clients.bodies_done,
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
