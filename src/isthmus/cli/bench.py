"""`isthmus bench MODEL`: tokens per second, and how near decoding comes to the machine's own read limit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli import options
from isthmus.config import DEFAULT_CONTEXT_TOKENS, MAX_PARALLEL, check_int
from isthmus.errors import UsageError


@options.with_run_options(options.RUN_OPTIONS.keys() - {"context_tokens", "parallel", "speculate"})
def bench(
    model: options.Model,
    prompt_tokens: Annotated[
        str, typer.Option("-p", "--prompt-tokens", help="Tokens of prompt; a list: 128,512.")
    ] = "512",
    new_tokens: Annotated[
        str, typer.Option("-n", "--new-tokens", help="Tokens to decode, at least; a list: 32,128.")
    ] = "32",
    batches: Annotated[
        str, typer.Option("-b", "--batch", help="Sequences that decode together; a list: 1,4,8.")
    ] = "1",
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", help="Of each size, after one that warms up.")
    ] = 3,
    strategies: Annotated[
        str | None,
        typer.Option(help="Compare strategies, each in its turn: cpu,stream,hybrid.", show_default=False),
    ] = None,
    show_ops: Annotated[
        bool, typer.Option("--ops", help="A decode step by operation: time, GB/s, share of the limit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables as Markdown.")] = False,
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
    prompts = options.counts("-p", prompt_tokens, 1 << 20)
    news = options.counts("-n", new_tokens, 1 << 20)
    widths = options.counts("-b", batches, MAX_PARALLEL)
    check_int("-r", repetitions, 1, 1000)
    traced = trace_sequences if trace_sequences is not None else 1 + run_options["overlap"]
    check_int("--trace-sequences", traced, 1, MAX_PARALLEL)
    if strategies is not None:
        if trace is not None:
            raise UsageError("--trace is of one strategy; leave --strategies out")
        _compare(strategies, as_json=as_json, markdown=markdown)
        return
    if trace is not None:
        try:
            trace.open("a").close()  # before minutes of loading
        except OSError as error:
            raise UsageError(f"--trace: {trace} cannot be written: {error.strerror}") from None
    need = max(prompts) + max(news) + 2
    ctx = need if need > DEFAULT_CONTEXT_TOKENS else None
    from isthmus.cli import bench_ops
    from isthmus.cli.bench_sizes import Result, Scales, Size, run_tests, sizes, table
    from isthmus.cli.load import bar, describe, say, status
    from isthmus.config import RunOptions
    from isthmus.resolve import resolve_model
    from isthmus.weights.source import open_weights

    parallel = max(*widths, traced if trace is not None else 1, 1)
    checked = RunOptions.from_kwargs(**run_options, context_tokens=ctx, parallel=parallel).with_environment()
    with bar(Path(model).name) as progress:
        path = resolve_model(model, progress=progress)
        from isthmus.cli.measure import measure
        from isthmus.engine.engine import Engine

        engine = Engine(path, checked, progress)
    say(describe(engine.info))
    scales = Scales.of_model(model)
    wanted, first = sizes(prompts, news, widths), Size(prompts[0], news[0])
    with status() as watch:
        tests = run_tests(engine, [size for size in wanted if size != first], repetitions, scales, watch)
        result = measure(engine, prompts[0], news[0], tests[0].tok_s, tests[0].multiply_gops, watch)
    with closing(open_weights(path)) as source:
        result["step_gb_s"] = bench_ops.rates(result, source)
    if first in wanted:
        decoded = Result(first, tuple(result["decode_slices_tok_s"]), scales.decode)
        tests.insert(wanted.index(first), decoded)
    several = max(len(prompts), len(news), *widths) > 1
    if scales != Scales():
        result["extrapolated"] = {
            "prefill_tok_s": result["prefill_tok_s"] * scales.prefill,
            "decode_tok_s": result["decode_tok_s"] * scales.decode,
        }
    if several:
        result["tests"] = [test.as_data() for test in tests]
    if trace is not None:
        from isthmus.cli.trace import trace_step

        step = trace_step(engine, prompts[0], traced)
        trace.write_text(step.to_json())
        say(f"{step.summary()}; {trace} opens in https://ui.perfetto.dev")
    if as_json:
        print(json.dumps(result))
        return
    shown = [_summary(result, prompts[0])]
    shown += [table(tests, markdown=markdown)] if several else []
    shown += [bench_ops.table(result, markdown=markdown)] if show_ops else []
    print("\n".join(line for part in shown for line in part))


def _compare(strategies: str, *, as_json: bool, markdown: bool) -> None:
    """This command line again, for each strategy."""
    import sys

    from isthmus.cli.bench_strategies import OWN_OPTIONS, measure_each, parse, table
    from isthmus.cli.load import say
    from isthmus.placement.machine import Machine

    names = parse(strategies)
    words = without(sys.argv[2:], OWN_OPTIONS)
    found = measure_each(names, words, bool(Machine.detect().gpus), say)
    print(json.dumps(found) if as_json else "\n".join(table(found, markdown=markdown)))


def without(words: list[str], options_: dict[str, int]) -> list[str]:
    """A command line without some options and their values."""
    kept, skip = [], 0
    for word in words:
        name, _, value = word.partition("=")
        if skip:
            skip -= 1
        elif name in options_:
            skip = 0 if value else options_[name]
        else:
            kept.append(word)
    return kept


def _summary(result: dict[str, Any], prompt_tokens: int) -> Iterator[str]:
    prefills, slices = result["prefill_runs_tok_s"], result["decode_slices_tok_s"]
    yield (
        f"prefill  {result['prefill_tok_s']:8.1f} tok/s  ({prompt_tokens} tokens; {min(prefills):.1f} to "
        f"{max(prefills):.1f} in {len(prefills)} runs)"
    )
    yield (
        f"decode   {result['decode_tok_s']:8.1f} tok/s  ({min(slices):.1f} to {max(slices):.1f} in "
        f"{len(slices)} slices; {result['bytes_per_token'] / 1e9:.3f} GB a token "
        f"is {result['read_gb_s']:.1f} GB/s: {result['decode_share']:.0%} of what this memory gives, "
        f"{result['read_limit_gb_s']:.1f} GB/s at its best)"
    )
    if len(states := result["memory_states"]) > 1:
        found = (
            f"{one['read_share']:.0%} of {one['read_limit_gb_s']:.1f} GB/s in {one['slices']} slices"
            for one in states
        )
        yield f"memory was in two states (this machine is shared): {' and '.join(found)}"
    if (whole := result.get("extrapolated")) is not None:
        yield (
            f"all layers (extrapolated by bytes, not measured): prefill {whole['prefill_tok_s']:.1f}, "
            f"decode {whole['decode_tok_s']:.2f} tok/s"
        )
    if (over := result["handed_over"]) is not None:
        moved = over["bytes_x"] + over["bytes_y"] + over["bytes_routing"]
        yield (
            f"handed over: {over['submits']} submits, {over['waits']} waits, {moved / 1e6:.1f} MB; "
            f"{over['waiting_s']:.2f} s of waiting for {over['experts_s']:.2f} s of experts"
        )
    if (use := result["experts"]) is not None and use["hits"]:
        yield (
            f"experts: {use['hits'] / (use['hits'] + use['misses']):.1%} of the choices on the device; "
            f"{use['bytes_streamed'] / 1e6:.1f} MB streamed, {use['bytes_uploaded'] / 1e6:.1f} MB cached"
        )
    yield f"outside weight products {result['outside_products_share']:.1%} of a decode step"
