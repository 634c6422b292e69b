"""A prompt through a whole model: tokens per second, beside the multiply rate and the read limit.

    python benches/prefill.py [MODEL] [--isa amx avx512 avx2] [-p 512]

Operations are those of the products with weights; attention adds to the time, not to them.
"""

from __future__ import annotations

from common import beside, multiply_limit, read_limit, report
from isthmus import native
from isthmus.cli.measure import prefill_seconds, random_prompt
from isthmus.engine.engine import Engine
from model import arguments, flop_per_prompt, loaded

ROUNDS = 4


class Prefill:
    """A call runs another prompt of random tokens up to its first answer token."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self._engine, self._tokens, self._seed = engine, tokens, 0

    def __call__(self) -> None:
        self._seed += 1
        prefill_seconds(self._engine, random_prompt(self._tokens, self._engine.info.vocab_size, self._seed))


def main() -> None:
    args = arguments(__doc__)
    with loaded(args.model) as (engine, path):
        flop = flop_per_prompt(path, args.prompt_tokens)
        for isa in args.isa:
            native.use_isa(isa)
            work = Prefill(engine, args.prompt_tokens)
            figures = beside(
                [multiply_limit(), read_limit()], work, engine.plan.weight_bytes, flop, slices=ROUNDS
            )
            rate = round(args.prompt_tokens / figures["ms"] * 1e3, 1)
            line = {"prompt_tokens": args.prompt_tokens, "tok_s": rate}
            report(bench="prefill", model=path.stem, **line, **figures)


if __name__ == "__main__":
    main()
