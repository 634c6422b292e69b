"""`isthmus pack MODEL`: the weights in the order in which they are computed with, once and for all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli import options


@options.with_run_options(("threads",))
def pack(
    model: options.Model,
    check: Annotated[bool, typer.Option("--check", help="Only check the cache that is there.")] = False,
    *,
    run_options: dict[str, Any],
    debug: options.Debug = False,
) -> None:
    """Store MODEL's packed weights, so that later starts map them instead of packing them again.

    The file is as large as the model and lies in the cache folder (ISTHMUS_CACHE); its path goes to standard
    output. It serves every instruction set and thread count.
    """
    from contextlib import closing

    from isthmus.cli.load import bar, say
    from isthmus.config import RunOptions
    from isthmus.resolve import resolve_model

    options.configure_logging(debug)
    checked = RunOptions.from_kwargs(**run_options).with_environment()
    with bar(Path(model).name) as progress:
        path = resolve_model(model, progress=progress)
        from isthmus import native
        from isthmus.engine.packed_cache import make_cache, verify_cache
        from isthmus.weights.packed_path import cache_path
        from isthmus.weights.source import open_weights

        if checked.threads is not None:
            native.set_threads(checked.threads)
        started = time.perf_counter()
        with closing(open_weights(path)) as source:
            if check:
                verify_cache(source, progress)
                made = cache_path(source.path)
            else:
                try:
                    made = make_cache(source, progress)
                except KeyboardInterrupt:
                    say("interrupted: no packed cache was made; one that was there is still there")
                    raise
    seconds, gb = time.perf_counter() - started, made.stat().st_size / 1e9
    say(f"{'checked' if check else 'packed'} {gb:.2f} GB in {seconds:.1f} s ({gb / seconds:.1f} GB/s)")
    print(made)
