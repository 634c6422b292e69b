"""How the rows of a step are shared between prompts that are being computed. Pure numbers.

The shortest goes first, since then most get their first token soonest; but the oldest always gets a quarter,
so a stream of short prompts cannot keep a long one from its end. While answers are being written a step is
kept short: whoever reads them waits for all of it between two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

# Of a step's rows, what prompts may take beside answers that are being written: 128 of 512 rows still give
# each expert of a 128-expert top-8 model 8 rows, and a token waits a quarter as long.
MIXED_SHARE = 4
OLDEST_SHARE = 4


def shares(pending: Sequence[int], budget: int, beside_decodes: bool) -> list[int]:
    """Rows for each prompt, of which so many are left to compute; the oldest stands first.

    They are at most `budget` together, and above 0 for the oldest if the budget is.
    """
    if beside_decodes:
        budget = min(budget, max(1, budget // MIXED_SHARE))
    if not pending or budget <= 0:
        return [0] * len(pending)
    given = [0] * len(pending)
    given[0] = min(pending[0], max(1, budget // OLDEST_SHARE))
    left = budget - given[0]
    for at in sorted(range(1, len(pending)), key=lambda at: pending[at]):
        given[at] = min(pending[at], left)
        left -= given[at]
    given[0] += min(pending[0] - given[0], left)
    return given
