"""`isthmus profile MODEL TEXT`: how often each expert is chosen, which says what is worth a GPU's memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli import options
from isthmus.errors import UsageError


@options.with_run_options(("threads", "isa", "chunk_tokens", "packed_cache"))
def profile(
    model: options.Model,
    text: Annotated[
        Path, typer.Argument(metavar="TEXT", help="A text like those the model will be used on, UTF-8.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File to write. Default: standard output.", show_default=False),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of the text to use, at most.")] = 100_000,
    *,
    run_options: dict[str, Any],
    debug: options.Debug = False,
) -> None:
    """Count how often each expert of MODEL is chosen on TEXT, and write that as JSON."""
    options.configure_logging(debug)
    from isthmus.cli.load import bar, describe, say
    from isthmus.config import RunOptions, check_int

    check_int("--max-tokens", max_tokens, 1, 1 << 30)
    try:
        words = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{text}: the text cannot be read: {error}") from None
    if not words.strip():
        raise UsageError(f"{text}: the text is empty, nothing can be counted")
    if output is not None:
        _check_output(output)
    checked = RunOptions.from_kwargs(**run_options, strategy="cpu").with_environment()
    with bar(Path(model).name) as progress:
        from contextlib import closing

        from isthmus.engine.count import count_experts
        from isthmus.engine.engine import Engine
        from isthmus.resolve import resolve_model
        from isthmus.tokenizer import Tokenizer
        from isthmus.weights.source import open_weights

        path = resolve_model(model, progress=progress)
        with closing(open_weights(path)) as source:
            tokenizer = Tokenizer.from_gguf(source.metadata)
            engine = Engine(path, checked, progress, source)
    say(describe(engine.info))
    tokens = tokenizer.encode(words, add_special=True, parse_special=False)
    counted = count_experts(engine, tokens[:max_tokens])
    if output is None:
        print(counted.to_json())
        return
    output.write_text(counted.to_json())
    say(f"{counted.tokens} tokens through {len(counted.counts)} layers of experts: {output}")


def _check_output(file: Path) -> None:
    """UsageError for what cannot be written: said before minutes of counting."""
    if file.is_dir():
        raise UsageError(f"--output: {file} is a folder; give the name of a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"--output: {file} cannot be written")
