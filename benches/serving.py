"""What the benches of the server share: servers as processes, and clients that note when each token came."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx

# About 110 tokens each, no two alike from the second word on: a prefix cache finds a template's beginning.
_TOPICS = ("rivers", "glaciers", "engines", "violins", "markets", "bridges", "comets", "harbours", "gardens")
_PROMPT = (
    "Number {number}: write a long and detailed essay about {topic}. Begin with their history, then say how "
    "they are made or came to be, who works with them, and what they cost; tell of three people who changed "
    "them, with the years and the places. Then compare them with {other}, say what both have in common and "
    "where they differ, and end with what a child should know about them. Use whole sentences and no lists. "
    "Do not stop early, do not repeat yourself, and do not speak about these instructions."
)


def prompt(number: int) -> str:
    topic, other = (_TOPICS[(number + step) % len(_TOPICS)] for step in (0, 3))
    return _PROMPT.format(number=number, topic=topic, other=other)


@dataclass
class Server:
    name: str
    url: str
    pid: int


@contextmanager
def isthmus(model: str, *options: str) -> Iterator[Server]:
    code = "from isthmus.cli.main import main; main()"
    with _started("isthmus", [sys.executable, "-c", code, "serve", model, *options], "/ready") as server:
        yield server


@contextmanager
def llama_server(program: Path, model: Path, threads: int, parallel: int, context: int) -> Iterator[Server]:
    """With as much context for each of its slots as one request of ours may have; else its own defaults."""
    command = [str(program), "-m", str(model), "-t", str(threads), "-tb", str(threads)]
    command += ["-np", str(parallel), "-c", str(context * parallel), "--no-webui"]
    with _started("llama-server", command, "/health") as server:
        yield server


@contextmanager
def _started(name: str, command: list[str], ready: str) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folders = [str(Path(command[0]).parent), os.environ.get("LD_LIBRARY_PATH", "")]
    env = os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders))}
    with subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env
    ) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(process, url + ready)
            yield Server(name, url, process.pid)
        finally:
            process.terminate()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    while process.poll() is None:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"{process.args} ended with exit code {process.returncode}")


@dataclass
class Run:
    """One streamed answer; times in seconds of the monotonic clock."""

    started: float
    token_times: list[float] = field(default_factory=list)
    text: str = ""
    num_tokens: int = 0

    @property
    def first_s(self) -> float:
        return self.token_times[0] - self.started

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


async def ask(
    client: httpx.AsyncClient,
    url: str,
    content: str,
    max_tokens: int,
    run: Run | None = None,
    **fields: Any,
) -> Run:
    """One answer, noted in `run` while it comes. fields: of the request, beside these."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "stream": True}
    body |= {"temperature": 0, "stream_options": {"include_usage": True}, **fields}
    run = run or Run(time.monotonic())
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{url}: {answer.status_code} {(await answer.aread()).decode()[:300]}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            run.num_tokens = (chunk.get("usage") or {}).get("completion_tokens", run.num_tokens)
            for choice in chunk["choices"]:
                if choice["delta"].get("content"):
                    run.text += choice["delta"]["content"]
                    run.token_times.append(time.monotonic())
    return run


async def crowd(url: str, num_clients: int, num_rounds: int, max_tokens: int, first: int) -> list[Run]:
    """`num_clients` at once, each asking one thing after the other; prompts are numbered from `first`.

    Every answer has `max_tokens` tokens.
    """
    async with client(num_clients) as http:

        async def one(index: int) -> list[Run]:
            numbers = range(first + index * num_rounds, first + (index + 1) * num_rounds)
            return [await ask(http, url, prompt(number), max_tokens, ignore_eos=True) for number in numbers]

        return [run for runs in await asyncio.gather(*map(one, range(num_clients))) for run in runs]


def client(num_clients: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(limits=httpx.Limits(max_connections=num_clients + 8), timeout=600)


def p50_p99_ms(seconds: list[float]) -> tuple[float, float]:
    if len(seconds) < 2:
        return (round(seconds[0] * 1e3, 1),) * 2 if seconds else (0.0, 0.0)
    cuts = quantiles(seconds, n=100, method="inclusive")
    return round(cuts[49] * 1e3, 1), round(cuts[98] * 1e3, 1)
