"""Options that several commands share, each written once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from isthmus.config import ISA_NAMES, KV_DTYPES, STRATEGIES
from isthmus.errors import UsageError

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A .gguf file (any shard of a split one), demo, or dummy:SHAPE."),
]
Ctx = Annotated[
    int | None, typer.Option("--ctx", help="Context in tokens. Default: the model's, 8192, or what fits.")
]
Threads = Annotated[int | None, typer.Option(help="CPU threads. Default: one per physical core.")]
Isa = Annotated[str | None, typer.Option(help=f"Instruction set: {', '.join(ISA_NAMES)}. Default: the best.")]
KvDtype = Annotated[str, typer.Option("--kv-dtype", help=f"Values in the cache: {', '.join(KV_DTYPES)}.")]
ExactBatching = Annotated[
    bool,
    typer.Option("--exact-batching", help="One driver for every row count: the same bits, slower prefill."),
]
Chunk = Annotated[int, typer.Option(help="Prompt tokens computed in one step.")]
PackedCache = Annotated[
    bool | None,
    typer.Option(
        "--packed-cache/--no-packed-cache",
        help="Store the packed weights for later starts; or ignore them. Default: use what is stored.",
        show_default=False,
    ),
]
Strategy = Annotated[str, typer.Option(help=f"Where the model's parts go: {', '.join(STRATEGIES)}.")]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:0 or cuda:0,1. Default: every GPU, else the CPU.")
]
GpuMemory = Annotated[
    str | None, typer.Option(help="Memory to fill of each GPU, such as 20GiB. Default: what is free.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and the engine's log.")]


def configure_logging(debug: bool) -> None:
    """Warnings as one line each on stderr; everything with --debug."""
    import logging
    import warnings

    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if debug else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s" if debug else "%(message)s",
        force=True,
    )
    # A failed step is told as the answer's error; its traceback is for --debug.
    logging.getLogger("isthmus.engine.loop").setLevel(logging.DEBUG if debug else logging.CRITICAL)
    if not debug:
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)


def utf8(text: str, what: str) -> str:
    """The text, if it is Unicode: bytes of the command line that were not UTF-8 arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not valid UTF-8 (at character {error.start})") from None
    return text
