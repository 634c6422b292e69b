"""Options that several commands share, each written once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.config import ISA_NAMES, RESIDUAL_DTYPES, STRATEGIES, RunOptions
from isthmus.errors import UsageError
from isthmus.formats.kv_cache import KV_DTYPES

if TYPE_CHECKING:
    from isthmus.engine.request import SamplingParams

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A .gguf file (any shard of a split one), owner/repo:QUANT, demo, or dummy:SHAPE.",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and the engine's log.")]

# Options of a run: field of RunOptions -> type and option on the command line. Defaults are the fields'.
RUN_OPTIONS: dict[str, Any] = {
    "context_tokens": Annotated[
        int | None, typer.Option("--ctx", help="Context in tokens. Default: the model's, 8192, or what fits.")
    ],
    "threads": Annotated[int | None, typer.Option(help="CPU threads. Default: one per physical core.")],
    "isa": Annotated[
        str | None, typer.Option(help=f"Instruction set: {', '.join(ISA_NAMES)}. Default: the best.")
    ],
    "kv_dtype": Annotated[
        str,
        typer.Option(
            help=f"Values in the cache: {', '.join(KV_DTYPES)}. q8_0: 1.88 times the tokens; approximate."
        ),
    ],
    "exact_batching": Annotated[
        bool,
        typer.Option("--exact-batching", help="One driver for every row count: same bits, slower prefill."),
    ],
    "chunk_tokens": Annotated[int, typer.Option("--chunk", help="Prompt tokens computed in one step.")],
    "parallel": Annotated[
        int, typer.Option(help="Requests computed together. They share the cache; the others wait.")
    ],
    "speculate": Annotated[
        str,
        typer.Option(help="Guess next tokens from the text so far (ngram) and verify them; or off."),
    ],
    "kv_ram": Annotated[
        str | None,
        typer.Option(help="CPU offload of a GPU's KV cache: RAM for blocks that it gives up, such as 32GiB."),
    ],
    "kv_disk": Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Keep the cache's full blocks there too: prompts outlive a restart."
        ),
    ],
    "kv_disk_size": Annotated[
        str, typer.Option(help="How much the folder of --kv-disk may hold.", show_default="16GiB")
    ],
    "packed_cache": Annotated[
        bool | None,
        typer.Option(
            "--packed-cache/--no-packed-cache",
            help="Store the packed weights for later starts; or ignore them. Default: use what is stored.",
            show_default=False,
        ),
    ],
    "strategy": Annotated[str, typer.Option(help=f"Where the model's parts go: {', '.join(STRATEGIES)}.")],
    "device": Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:0 or cuda:0,1. Default: every GPU, else the CPU.")
    ],
    "gpu_memory": Annotated[
        str | None, typer.Option(help="Memory to fill of each GPU, such as 20GiB. Default: what is free.")
    ],
    "profile": Annotated[
        str | None, typer.Option(help="A file of `isthmus profile`: its most used experts go to the GPU.")
    ],
    "expert_cache": Annotated[
        str | None, typer.Option(help="GPU memory for experts that decoding uses, such as 4GiB.")
    ],
    "stream_rows": Annotated[
        int | None,
        typer.Option(help="Rows of a prompt from which an expert crosses to the GPU. Default: measured."),
    ],
    "residual_dtype": Annotated[
        str | None,
        typer.Option(
            help=f"Rows between layers: {', '.join(RESIDUAL_DTYPES)}. Default: bf16 on a GPU, f32 on the CPU."
        ),
    ],
    "defer_experts": Annotated[
        int,
        typer.Option(
            help="hybrid: this many experts of a token, of lowest weight, join one layer late. Approximate."
        ),
    ],
    "overlap": Annotated[
        bool,
        typer.Option("--overlap", help="hybrid: two halves of a step take turns on device and CPU. Exact."),
    ],
}


# How tokens are chosen: field of SamplingParams -> option on the command line, and its default there.
SAMPLING_OPTIONS: dict[str, tuple[Any, Any]] = {
    "temperature": (Annotated[float, typer.Option(help="0 always takes the most probable token.")], 0.7),
    "top_k": (Annotated[int, typer.Option(help="Only the k most probable tokens; 0: all.")], 0),
    "top_p": (Annotated[float, typer.Option(help="Only the most probable tokens up to this mass.")], 0.95),
    "min_p": (Annotated[float, typer.Option(help="Only tokens this probable relative to the first.")], 0.0),
    "repetition_penalty": (Annotated[float, typer.Option(help="Above 1: less of what was said.")], 1.0),
    "seed": (Annotated[int | None, typer.Option(help="The same seed gives the same answer.")], None),
    "max_tokens": (Annotated[int | None, typer.Option(help="Longest answer. Default: the context.")], None),
    "stop": (Annotated[list[str] | None, typer.Option(help="The answer ends before this text.")], None),
}
Url = Annotated[
    str | None, typer.Option(help="Ask a running server, as http://localhost:8080, instead of loading MODEL.")
]
ApiKey = Annotated[str | None, typer.Option(help="Key of the server at --url.")]


def counts(name: str, text: str, most: int) -> list[int]:
    """`128,512` -> [128, 512]: whole numbers from 1 to `most`."""
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) if word.isascii() and word.isdigit() and len(word) < 10 else 0 for word in words]
    if not 1 <= min(numbers) <= max(numbers) <= most:
        raise UsageError(f"{name} must be a whole number from 1 to {most}, or some as 128,512, got {text!r}")
    return numbers


def with_run_options(
    names: Collection[str] = RUN_OPTIONS.keys(), **own_defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command these of RUN_OPTIONS in the place of its parameter `run_options`.

    There it gets them as a dict, which RunOptions.from_kwargs takes. own_defaults: where they are not the
    fields' own.
    """

    defaults = {field.name: field.default for field in fields(RunOptions)} | own_defaults
    kinds = {name: kind for name, kind in RUN_OPTIONS.items() if name in names}
    return _in_place_of("run_options", kinds, defaults, lambda given: given)


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command SAMPLING_OPTIONS in the place of its parameter `params`, which gets SamplingParams."""
    kinds = {name: kind for name, (kind, _) in SAMPLING_OPTIONS.items()}
    defaults = {name: default for name, (_, default) in SAMPLING_OPTIONS.items()}
    return _in_place_of("params", kinds, defaults, _sampling_params)(command)


def _sampling_params(given: dict[str, Any]) -> SamplingParams:
    from isthmus.engine.request import SamplingParams

    stop = tuple(utf8(text, "--stop") for text in given.pop("stop") or ())
    return SamplingParams(**given, stop=stop)


def _in_place_of(
    place: str, kinds: Mapping[str, Any], defaults: Mapping[str, Any], make: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Options in the place of one parameter, which gets what `make` makes of their values."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        offered = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)
            for name, kind in kinds.items()
        ]

        @wraps(command)
        def with_options(**given: Any) -> None:
            values = {option.name: given.pop(option.name) for option in offered}
            command(**given, **{place: make(values)})

        parameters: list[inspect.Parameter] = []
        for own in signature.parameters.values():
            parameters += offered if own.name == place else [_by_keyword(own)]
        # What typer reads: both the parameters and their types.
        with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {own.name: own.annotation for own in parameters}
        return with_options

    return decorate


def _by_keyword(parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


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
