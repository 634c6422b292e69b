"""Many clients that come and go: is every answer right, does memory stay, is the cache free at the end?

    python benches/soak.py [MODEL] [--clients 200] [--seconds 600] [--prompts 24] [--tokens 24]

Each client asks for one of --prompts things, streamed or whole, and leaves at random before, in or after the
answer. An answer that was read to its end is compared with the one that the same prompt gave alone, bit for
bit: the server runs with --exact-batching. Clients beyond the queue must get 503 and Retry-After. One JSON
line every ten seconds, one for what is wrong when it happens, one at the end; exit code 1 for a wrong answer,
for memory of server or engine that grew by more than 1 % since a tenth of the time, or for blocks that stay
taken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from common import report
from serving import Server, ask, client, isthmus, prompt

_GROWTH = 1.01
_REPORT_S = 10.0


class Soak:
    def __init__(self, server: Server, args: argparse.Namespace) -> None:
        self._url = server.url
        self._pid = server.pid
        self._args = args
        self._alone: list[str] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._memory: list[int] = []  # at a tenth of the time, and at the end

    async def run(self) -> None:
        async with client(self._args.clients) as http:
            for number in range(self._args.prompts):
                self._alone.append((await ask(http, self._url, prompt(number), self._args.tokens)).text)
            end = time.monotonic() + self._args.seconds
            everybody = [
                asyncio.create_task(self._client(http, index, end)) for index in range(self._args.clients)
            ]
            await asyncio.sleep(self._args.seconds / 10)
            self._memory.append(memory_bytes(self._pid))
            while time.monotonic() < end:
                await asyncio.sleep(min(_REPORT_S, max(0.1, end - time.monotonic())))
                report(**self.counts, wrong=len(self.wrong), memory_mb=memory_bytes(self._pid) >> 20)
            await asyncio.gather(*everybody)
            self._memory.append(memory_bytes(self._pid))

    async def _client(self, http: httpx.AsyncClient, index: int, end: float) -> None:
        chance = random.Random(index)
        while time.monotonic() < end:
            number = chance.randrange(self._args.prompts)
            patience_s = chance.choice([0.05, 0.5, 2.0, 600.0])
            try:
                async with asyncio.timeout(patience_s):
                    await self._ask(http, number, stream=chance.random() < 0.7)
            except TimeoutError:
                self.counts["left"] += 1
            except httpx.TransportError as error:
                self._is_wrong(f"transport: {error!r}")

    async def _ask(self, http: httpx.AsyncClient, number: int, *, stream: bool) -> None:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": prompt(number)}],
            "max_tokens": self._args.tokens,
            "temperature": 0,
            "stream": stream,
        }
        async with http.stream("POST", f"{self._url}/v1/chat/completions", json=body) as answer:
            data = await answer.aread()
        if answer.status_code == 503 and "retry-after" in answer.headers:
            self.counts["told to wait"] += 1
            await asyncio.sleep(random.random())
        elif answer.status_code != 200:
            self._is_wrong(f"{answer.status_code} {data[:200]!r}")
        elif (text := text_of(data, stream=stream)) != self._alone[number]:
            self._is_wrong(f"prompt {number}: {text!r} instead of {self._alone[number]!r}")
        else:
            self.counts["right"] += 1

    def _is_wrong(self, what: str) -> None:
        self.wrong.append(what)
        report(wrong=what)

    def verdict(self) -> list[str]:
        """What is wrong at the end."""
        found = self.wrong[:5]
        before, after = self._memory
        if after > before * _GROWTH:
            found.append(f"memory grew from {before >> 20} to {after >> 20} MiB")
        used = metric(self._url, "isthmus_kv_cache_usage_perc")
        running = metric(self._url, "isthmus_num_requests_running")
        if used or running:
            found.append(f"{used:.1%} of the cache and {running:g} requests are left over")
        return found


def text_of(data: bytes, *, stream: bool) -> str:
    if not stream:
        return str(json.loads(data)["choices"][0]["message"]["content"])
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n") if line.startswith("data: {")]
    return "".join(
        choice["delta"].get("content", "") for line in lines for choice in json.loads(line)["choices"]
    )


def memory_bytes(pid: int) -> int:
    """Resident memory of a process and its children, without what files map."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    total = 0
    for each in [str(pid), *children]:
        with contextlib.suppress(FileNotFoundError):
            status = Path(f"/proc/{each}/status").read_text()
            total += int(status.partition("RssAnon:")[2].split()[0]) << 10
    return total


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    with isthmus(
        args.model, "--exact-batching", "--ctx", "1024", "--max-queue", str(args.clients // 2)
    ) as server:
        soak = Soak(server, args)
        asyncio.run(soak.run())
        time.sleep(1.0)  # the engine's last report
        found = soak.verdict()
    report(**soak.counts, verdict=found or "well")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
