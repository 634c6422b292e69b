"""Time between a client's tokens beside another client that posts a megabyte in a loop.

    python benches/neighbour.py [MODEL] [--kinds template markup tokenize chat] [--seconds 4] [--rounds 3]

What the neighbour posts, over and over, from a process of its own that does nothing else:

template    /apply-template: a conversation of plain words
markup      the same of markup, whose characters special tokens are made of
tokenize    /tokenize: a text of plain words
chat        /v1/chat/completions: a conversation that does not fit into the context, which is refused

Each round takes the gaps between the tokens of one client's answers for --seconds, alone and beside each
neighbour in turn. One JSON line a kind: p50 and p99 of the gaps in ms, the medians of the rounds; the ratio
of the p99 is the median of the ratios within a round; and how many posts the neighbour had answered a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from urllib.parse import urlsplit

from serving import Run, Server, ask, client, isthmus, p50_p99_ms, prompt

POST_BYTES = 1 << 20
CONTEXT = 4096
TOKENS = 300  # of an answer
_WORDS, _MARKUP = "x ", '<a href="b">[c](d) | {e}</a>\n'
_RECEIVE_BYTES = 1 << 20


def _chat(text: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text * (POST_BYTES // len(text))}], "max_tokens": 1}


KINDS = {
    "template": ("/apply-template", _chat(_WORDS)),
    "markup": ("/apply-template", _chat(_MARKUP)),
    "tokenize": ("/tokenize", {"content": _WORDS * (POST_BYTES // len(_WORDS))}),
    "chat": ("/v1/chat/completions", _chat(_WORDS)),
}


@dataclass
class Neighbour:
    """What became of one; `posts_s` once it has ended."""

    posts_s: float = 0.0


@contextmanager
def neighbour(url: str, kind: str | None) -> Iterator[Neighbour]:
    """A process that posts until the block ends; None: nobody."""
    seen = Neighbour()
    if kind is None:
        yield seen
        return
    command = [sys.executable, __file__, "--post", url, "--kinds", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)  # the first has been answered
        started = time.monotonic()
        try:
            yield seen
        finally:
            process.send_signal(signal.SIGTERM)
            seen.posts_s = len(process.stdout.read()) / (time.monotonic() - started)


def post(url: str, kind: str) -> None:
    """Posts for ever, one byte to stdout for each answer. Its own work is copying bytes, and no more."""
    path, body = KINDS[kind]
    data = json.dumps(body).encode()
    host, port = urlsplit(url).hostname, urlsplit(url).port
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    buffer = bytearray(_RECEIVE_BYTES)
    with socket.create_connection((host, port)) as connection:
        while True:
            connection.sendall(request)
            _drain(connection, buffer)
            os.write(1, b".")


def _drain(connection: socket.socket, buffer: bytearray) -> None:
    """Reads one answer of known length."""
    begin = b""
    while b"\r\n\r\n" not in begin:
        if not (piece := connection.recv(4096)):
            raise SystemExit("the server closed the connection before its answer")
        begin += piece
    head, _, rest = begin.partition(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    left = int(lines[b"content-length"]) - len(rest)
    while left > 0:
        if not (size := connection.recv_into(buffer, min(left, len(buffer)))):
            raise SystemExit("the server closed the connection within its answer")
        left -= size


async def gaps_s(url: str, seconds: float) -> list[float]:
    """Between the tokens of one answer after the other, for so long; the gap that is cut off counts too."""
    runs: list[Run] = []

    async def read() -> None:
        async with client(1) as http:
            for number in itertools.count():
                runs.append(Run(time.monotonic()))
                await ask(http, url, prompt(number), TOKENS, run=runs[-1])

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await read()
    if times := runs[-1].token_times:
        times.append(time.monotonic())
    return [gap for run in runs for gap in run.gaps_s] or [seconds]


def compare(server: Server, kinds: list[str], seconds: float, num_rounds: int) -> None:
    from common import report  # torch: not in the neighbour's process
    from isthmus.cli.measure import commit

    asyncio.run(gaps_s(server.url, 1.0))
    rounds: dict[str | None, list[tuple[float, float]]] = {None: [], **{kind: [] for kind in kinds}}
    posts: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(num_rounds):
        for kind, figures in rounds.items():
            with neighbour(server.url, kind) as seen:
                figures.append(p50_p99_ms(asyncio.run(gaps_s(server.url, seconds))))
            if kind is not None:
                posts[kind].append(round(seen.posts_s, 1))
    for kind in kinds:
        pairs = list(zip(rounds[None], rounds[kind], strict=True))
        report(
            case="1 MB neighbour",
            kind=kind,
            alone_ms=tuple(median(alone[at] for alone, _ in pairs) for at in (0, 1)),
            beside_ms=tuple(median(beside[at] for _, beside in pairs) for at in (0, 1)),
            p99_ratio=round(median(beside[1] / alone[1] for alone, beside in pairs), 2),
            p99_ratios=[round(beside[1] / alone[1], 2) for alone, beside in pairs],
            posts_s=median(posts[kind]),
            commit=commit(),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--post", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.post:
        post(args.post, args.kinds[0])
    threads = ["--threads", str(args.threads)] if args.threads else []
    with isthmus(args.model, "--ctx", str(CONTEXT), *threads) as server:
        compare(server, args.kinds, args.seconds, args.rounds)


if __name__ == "__main__":
    main()
