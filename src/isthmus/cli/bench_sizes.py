"""The table of `isthmus bench -p 128,512 -n 32,128 -b 1,4`: a test for each size, with its spread.

A test is a prompt of so many tokens (pp512), or so many tokens decoded by so many sequences at once after a
prompt (tg32, tg32@b4), as llama-bench names them. Each is repeated; figures are medians, with the slowest
and the fastest beside them. The first decode of one sequence is not run here: its figures are those of the
slices that `measure` takes beside the memory's.

A dummy model of fewer layers than its shape is priced for all of them, by the bytes of weights that a token
takes: said to be extrapolated, since nobody ran it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from isthmus import native
from isthmus.cli.measure import Watch, prefill_seconds, random_prompt
from isthmus.engine.request import Request, SamplingParams
from isthmus.errors import EngineError
from isthmus.placement.show_report import table as aligned

if TYPE_CHECKING:
    from isthmus.engine.engine import Engine
    from isthmus.weights.source import WeightSource


MULTIPLY_S = 0.07  # a slice of the cores' multiply rate


@dataclass(frozen=True)
class Size:
    """new 0: the prompt alone."""

    prompt: int
    new: int = 0
    batch: int = 1

    def __str__(self) -> str:
        if not self.new:
            return f"pp{self.prompt}"
        return f"tg{self.new}" + (f"@b{self.batch}" if self.batch > 1 else "")


@dataclass(frozen=True)
class Result:
    """tok/s of each repetition, of all sequences together; scale: what all layers would take of it.

    multiply_gops: int8 products of all threads, right before each prompt.
    """

    size: Size
    tok_s: tuple[float, ...]
    scale: float = 1.0
    multiply_gops: tuple[float, ...] = ()

    def as_data(self) -> dict[str, Any]:
        found = {
            "test": str(self.size),
            "prompt_tokens": self.size.prompt,
            "new_tokens": self.size.new,
            "batch": self.size.batch,
            "repetitions": len(self.tok_s),
            "tok_s": median(self.tok_s),
            "tok_s_low": min(self.tok_s),
            "tok_s_high": max(self.tok_s),
        }
        return found | ({"extrapolated_tok_s": median(self.tok_s) * self.scale} if self.scale != 1 else {})


def sizes(prompts: Sequence[int], news: Sequence[int], batches: Sequence[int]) -> list[Size]:
    """Every prompt, then every number of tokens with every batch, after the first prompt."""
    return [Size(p) for p in prompts] + [Size(prompts[0], n, b) for n in news for b in batches]


def run_tests(
    engine: Engine, wanted: Sequence[Size], repetitions: int, scales: Scales, watch: Watch
) -> list[Result]:
    """One repetition of each after the other, so that a slow minute is shared; the first round warms up."""
    found: dict[Size, list[float]] = {size: [] for size in wanted}
    products: dict[Size, list[float]] = {size: [] for size in wanted}
    for number in range(1 + repetitions):
        for size in wanted:
            doing = f"{size}, {f'{number} of {repetitions}' if number else 'warm-up'}"
            gops = () if size.new else (native.multiply_gops("int8", MULTIPLY_S),)
            rate = _tok_s(engine, size, number, _named(doing, watch))
            if number:
                found[size].append(rate)
                products[size] += gops
    return [Result(size, tuple(found[size]), scales.of(size), tuple(products[size])) for size in wanted]


def _named(doing: str, watch: Watch) -> Watch:
    return lambda text: watch(f"{doing}: {text}")


def table(results: Sequence[Result], *, markdown: bool) -> Iterator[str]:
    extrapolated = any(result.scale != 1 for result in results)
    rows = [["test", "tok/s", "slowest", "fastest", *["all layers (extrapolated)"] * extrapolated]]
    for result in results:
        rates = (median(result.tok_s), min(result.tok_s), max(result.tok_s))
        more = [f"{rates[0] * result.scale:.2f}"] * extrapolated
        rows.append([str(result.size), *(f"{rate:.2f}" for rate in rates), *more])
    yield from lines(rows, markdown=markdown)


def lines(rows: Sequence[Sequence[str]], *, markdown: bool) -> Iterator[str]:
    """The first row is the head, the first column text, the others numbers."""
    if not markdown:
        yield from aligned([tuple(row) for row in rows], left=(0,))
        return
    head, *others = rows
    for row in (head, ["---", *["---:"] * (len(head) - 1)], *others):
        yield f"| {' | '.join(row)} |"


@dataclass(frozen=True)
class Scales:
    """What a rate is multiplied with to stand for all layers: 1 where all are there."""

    prefill: float = 1.0
    decode: float = 1.0

    def of(self, size: Size) -> float:
        return self.decode if size.new else self.prefill

    @classmethod
    def of_model(cls, name: str) -> Scales:
        from isthmus.placement.sizes import decode_weight_bytes
        from isthmus.weights.dummy import DummySpec
        from isthmus.weights.source import DUMMY, open_weights

        if not name.startswith(DUMMY) or DummySpec.parse(name).layers is None:
            return cls()
        spec = DummySpec.parse(name)
        part, whole = open_weights(name), open_weights(f"{DUMMY}{spec.shape}?quant={spec.quant}")
        some, every = decode_weight_bytes(part), decode_weight_bytes(whole)
        return cls((some - _head_bytes(part)) / (every - _head_bytes(whole)), some / every)


def _head_bytes(source: WeightSource) -> int:
    tensors = source.tensors
    return tensors["output.weight" if "output.weight" in tensors else "token_embd.weight"].nbytes


def _tok_s(engine: Engine, size: Size, seed: int, watch: Watch) -> float:
    vocab = engine.info.vocab_size
    if not size.new:
        return size.prompt / prefill_seconds(engine, random_prompt(size.prompt, vocab, seed=seed), watch)
    for i in range(size.batch):
        prompt = random_prompt(size.prompt, vocab, seed=1000 * seed + i)
        params = SamplingParams(temperature=0.0, max_tokens=size.new + 1)
        engine.add(Request(f"bench{i}", prompt, params, cache_salt=str(time.monotonic_ns())))
    have = [0] * size.batch
    started = 0.0  # when every sequence had its first token
    counted = 0
    while engine.has_work:
        outputs = engine.step()
        for output in outputs:
            if output.error:
                raise EngineError(output.error)
            have[int(output.request_id.removeprefix("bench"))] = output.num_output_tokens
        if started:
            counted += sum(output.token is not None for output in outputs)
            stopped = time.perf_counter()
        elif min(have):
            started = time.perf_counter()
        watch(f"{sum(have)} of {size.batch * (size.new + 1)} tokens")
    return counted / (stopped - started)
