"""`isthmus bench MODEL`: tokens per second, and how near decoding comes to the machine's own read limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli import options
from isthmus.config import DEFAULT_CONTEXT_TOKENS, MAX_PARALLEL, check_int


@options.with_run_options(options.RUN_OPTIONS.keys() - {"context_tokens", "parallel", "speculate"})
def bench(
    model: options.Model,
    prompt_tokens: Annotated[int, typer.Option("-p", "--prompt-tokens", help="Tokens of prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option("-n", "--new-tokens", help="Tokens to decode, at least.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a Chrome trace of one decode step to this file.", show_default=False),
    ] = None,
    trace_sequences: Annotated[
        int | None,
        typer.Option(
            help="Sequences that the traced step decodes. Default: 1; 2 with --overlap.", show_default=False
        ),
    ] = None,
    *,
    run_options: dict[str, Any],
    debug: options.Debug = False,
) -> None:
    """Measure prefill and decode, the latter against what the memory gives."""
    options.configure_logging(debug)
    check_int("-p", prompt_tokens, 1, 1 << 20)
    check_int("-n", new_tokens, 1, 1 << 20)
    traced = trace_sequences if trace_sequences is not None else 1 + run_options["overlap"]
    check_int("--trace-sequences", traced, 1, MAX_PARALLEL)
    need = prompt_tokens + new_tokens + 1
    ctx = need if need > DEFAULT_CONTEXT_TOKENS else None
    from isthmus.cli.load import bar, describe, say
    from isthmus.config import RunOptions
    from isthmus.resolve import resolve_model

    parallel = traced if trace is not None else 1
    checked = RunOptions.from_kwargs(**run_options, context_tokens=ctx, parallel=parallel).with_environment()
    with bar(Path(model).name) as progress:
        path = resolve_model(model, progress=progress)
        from isthmus.cli.measure import measure
        from isthmus.engine.engine import Engine

        engine = Engine(path, checked, progress)
    say(describe(engine.info))
    result = measure(engine, prompt_tokens, new_tokens)
    if trace is not None:
        from isthmus.cli.trace import trace_step

        step = trace_step(engine, prompt_tokens, traced)
        trace.write_text(step.to_json())
        say(f"{step.summary()}; {trace} opens in https://ui.perfetto.dev")
    if as_json:
        print(json.dumps(result))
        return
    print(f"prefill  {result['prefill_tok_s']:8.1f} tok/s  ({prompt_tokens} tokens)")
    print(
        f"decode   {result['decode_tok_s']:8.1f} tok/s  ({result['bytes_per_token'] / 1e9:.3f} GB a token "
        f"is {result['read_gb_s']:.1f} GB/s: {result['decode_share']:.0%} of what this memory gives, "
        f"{result['read_limit_gb_s']:.1f} GB/s at its best)"
    )
    if (over := result["handed_over"]) is not None:
        moved = over["bytes_x"] + over["bytes_y"] + over["bytes_routing"]
        print(
            f"handed over: {over['submits']} submits, {over['waits']} waits, {moved / 1e6:.1f} MB; "
            f"{over['waiting_s']:.2f} s of waiting for {over['experts_s']:.2f} s of experts"
        )
    if (use := result["experts"]) is not None and use["hits"]:
        print(
            f"experts: {use['hits'] / (use['hits'] + use['misses']):.1%} of the choices on the device; "
            f"{use['bytes_streamed'] / 1e6:.1f} MB streamed, {use['bytes_uploaded'] / 1e6:.1f} MB cached"
        )
    print(f"outside weight products {result['outside_products_share']:.1%} of a decode step")
