"""Throughput and latency of the server at 1 to 32 clients, beside llama-server on the same file.

    python benches/server.py [MODEL] [--clients 1 2 4 8 16 32] [--tokens 96] [--llama-server PATH]

MODEL: a .gguf file or demo. Each client asks for answers of up to --tokens tokens to prompts of about 110
tokens, no two alike, one after the other; every token's time is noted where it arrives. One JSON line a case:
tokens per second of all clients together, time to first token and time between tokens (p50, p99). Servers are
run in turns, never at once, with as many threads and slots. Then, of Isthmus alone: what a repeated prefix of
2,000 tokens costs, and the time between tokens beside a client that posts megabytes (see neighbour.py).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import httpx

from common import report
from isthmus.cli.measure import commit
from isthmus.resolve import resolve_model
from neighbour import KINDS, compare
from serving import Run, Server, ask, client, crowd, isthmus, llama_server, p50_p99_ms

CONTEXT = 4096  # of one request
PREFIX_WORDS = 1_500  # about 2,000 tokens
NEIGHBOUR_SECONDS, NEIGHBOUR_ROUNDS = 4.0, 3


def measure(server: Server, num_clients: int, num_rounds: int, num_tokens: int, first: int) -> None:
    started = time.monotonic()
    runs = asyncio.run(crowd(server.url, num_clients, num_rounds, num_tokens, first))
    seconds = time.monotonic() - started
    total = sum(run.num_tokens for run in runs)
    report(
        server=server.name,
        clients=num_clients,
        tokens=total,
        tok_s=round(total / seconds, 1),
        **latencies(runs),
        commit=commit(),
    )


def latencies(runs: list[Run]) -> dict[str, float]:
    first = p50_p99_ms([run.first_s for run in runs if run.token_times])
    gaps = p50_p99_ms([gap for run in runs for gap in run.gaps_s])
    names = ("first_ms_p50", "first_ms_p99", "between_ms_p50", "between_ms_p99")
    return dict(zip(names, (*first, *gaps), strict=True))


async def prefix(url: str) -> tuple[float, float]:
    """Seconds to the first token for a long prompt, and for it again with another question behind it."""
    text = " ".join(f"fact {number} is {number * 37 % 1009};" for number in range(PREFIX_WORDS // 4))
    async with client(1) as http:
        cold = await ask(http, url, f"{text} What is fact 3?", 4)
        warm = await ask(http, url, f"{text} And what is fact 5?", 4)
    return cold.first_s, warm.first_s


def extras(server: Server) -> None:
    cold, warm = asyncio.run(prefix(server.url))
    report(
        case="repeated prefix", first_s=round(cold, 3), again_s=round(warm, 3), share=round(warm / cold, 3)
    )
    compare(server, list(KINDS), NEIGHBOUR_SECONDS, NEIGHBOUR_ROUNDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=1, help="answers that each client asks for")
    parser.add_argument("--threads", type=int, help="of both; default: as many as Isthmus takes")
    parser.add_argument("--llama-server", type=Path)
    args = parser.parse_args()
    parallel = max(args.clients)
    own = ["--ctx", str(CONTEXT), "--parallel", str(parallel)]
    with isthmus(args.model, *own, *(["--threads", str(args.threads)] if args.threads else [])) as server:
        threads = args.threads or _threads(server)
        run_cases(server, args)
        extras(server)
    if args.llama_server:
        path = resolve_model(args.model)
        with llama_server(args.llama_server, path, threads, parallel, CONTEXT) as server:
            run_cases(server, args)


def run_cases(server: Server, args: argparse.Namespace) -> None:
    asyncio.run(crowd(server.url, 1, 1, 4, first=0))  # pages and caches as in use
    first = 1
    for num_clients in args.clients:
        measure(server, num_clients, args.rounds, args.tokens, first)
        first += num_clients * args.rounds


def _threads(server: Server) -> int:
    return int(httpx.get(f"{server.url}/ready").json()["threads"])


if __name__ == "__main__":
    main()
