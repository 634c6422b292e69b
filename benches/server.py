"""Throughput and latency of the server at 1 to 32 clients, beside llama-server on the same file.

    python benches/server.py [MODEL] [--clients 1 2 4 8 16 32] [--tokens 96] [--llama-server PATH]

MODEL: a .gguf file (see make_gguf.py --tokenizer) or demo. Each client asks for answers of exactly --tokens
tokens to prompts of about 110 tokens, no two alike, one after the other; every token's time is noted where it
arrives. One JSON line a case: tokens per second of all clients together, time to first token and time between
tokens (p50, p99). Servers are run in turns, never at once, with as many threads, and with slots and context
for as many clients as there are at most; then come the ratios of each pair of turns. In the first turn also,
as --extras says: prefix, what a repeated prefix of 2,000 tokens costs; neighbour, of Isthmus alone, the time
between tokens beside a client that posts megabytes (see neighbour.py).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from common import report
from isthmus.cli.measure import commit
from isthmus.resolve import resolve_model
from neighbour import KINDS, compare
from serving import Run, Server, ask, client, crowd, isthmus, llama_server, p50_p99_ms

CONTEXT = 4096  # of one request; --ctx
PREFIX_FACTS = 190  # of 10 or 11 tokens each: about 2,000
PREFIX_ROUNDS = 3
NEIGHBOUR_SECONDS, NEIGHBOUR_ROUNDS = 4.0, 3

EXTRAS = ("prefix", "neighbour")

Case = dict[str, Any]


def measure(server: Server, num_clients: int, num_rounds: int, num_tokens: int, first: int) -> Case:
    started = time.monotonic()
    runs = asyncio.run(crowd(server.url, num_clients, num_rounds, num_tokens, first))
    seconds = time.monotonic() - started
    total = sum(run.num_tokens for run in runs)
    case = {
        "server": server.name,
        "clients": num_clients,
        "tokens": total,
        "tok_s": round(total / seconds, 1),
        **latencies(runs),
    }
    report(**case, commit=commit())
    return case


def latencies(runs: list[Run]) -> dict[str, float]:
    first = p50_p99_ms([run.first_s for run in runs if run.token_times])
    gaps = p50_p99_ms([gap for run in runs for gap in run.gaps_s])
    names = ("first_ms_p50", "first_ms_p99", "between_ms_p50", "between_ms_p99")
    return dict(zip(names, (*first, *gaps), strict=True))


async def prefix(url: str, first_fact: int) -> tuple[float, float]:
    """Seconds to the first token for a long prompt, and for it again with another question behind it."""
    facts = range(first_fact, first_fact + PREFIX_FACTS)
    text = " ".join(f"fact {number} is {number * 37 % 1009};" for number in facts)
    async with client(1) as http:
        cold = await ask(http, url, f"{text} What is fact 3?", 4)
        warm = await ask(http, url, f"{text} And what is fact 5?", 4)
    return cold.first_s, warm.first_s


def measure_prefix(server: Server) -> None:
    """Medians over several prefixes of 2,000 tokens."""
    pairs = [asyncio.run(prefix(server.url, 200 * number)) for number in range(PREFIX_ROUNDS)]
    report(
        case="repeated prefix",
        server=server.name,
        first_s=round(median(cold for cold, _ in pairs), 3),
        again_s=round(median(warm for _, warm in pairs), 3),
        share=round(median(warm / cold for cold, warm in pairs), 3),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=1, help="answers that each client asks for")
    parser.add_argument("--repeat", type=int, default=1, help="turns of each server")
    parser.add_argument("--ctx", type=int, default=CONTEXT, help="context of one client")
    parser.add_argument("--threads", type=int, help="of both; default: as many as Isthmus takes")
    parser.add_argument("--extras", nargs="*", choices=EXTRAS, default=EXTRAS, help="default: all")
    parser.add_argument("--llama-server", type=Path)
    args = parser.parse_args()
    path, threads, parallel = resolve_model(args.model), args.threads, max(args.clients)
    pairs: list[tuple[Case, Case]] = []
    for turn in range(args.repeat):
        given = ["--threads", str(threads)] if threads else []
        with isthmus(args.model, "--ctx", str(args.ctx), "--parallel", str(parallel), *given) as server:
            threads = threads or _threads(server)
            ours = run_cases(server, args, turn)
            if turn == 0 and "neighbour" in args.extras:
                compare(server, list(KINDS), NEIGHBOUR_SECONDS, NEIGHBOUR_ROUNDS)
        if args.llama_server:
            with llama_server(args.llama_server, path, threads, parallel, args.ctx) as server:
                pairs += zip(ours, run_cases(server, args, turn), strict=True)
    for num_clients in args.clients if pairs else ():
        report(clients=num_clients, **ratios([pair for pair in pairs if pair[0]["clients"] == num_clients]))


def run_cases(server: Server, args: argparse.Namespace, turn: int) -> list[Case]:
    asyncio.run(crowd(server.url, 1, 1, 4, first=0))  # pages and caches as in use
    cases, first = [], 1
    for num_clients in args.clients:
        cases.append(measure(server, num_clients, args.rounds, args.tokens, first))
        first += num_clients * args.rounds
    if turn == 0 and "prefix" in args.extras:
        measure_prefix(server)
    return cases


def ratios(pairs: list[tuple[Case, Case]]) -> dict[str, float]:
    """Isthmus over llama-server, each the median over the turns of the ratio within a turn."""
    names = [name for name in pairs[0][0] if name not in ("server", "clients", "tokens")]
    return {f"{name}_ratio": round(median(a[name] / b[name] for a, b in pairs), 2) for name in names}


def _threads(server: Server) -> int:
    return int(httpx.get(f"{server.url}/ready").json()["threads"])


if __name__ == "__main__":
    main()
