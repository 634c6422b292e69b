"""Many literal texts as one pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter


def any_of(literals: Iterable[str]) -> re.Pattern[str] | None:
    """Matches the longest literal at the first place where any begins; None if there are none."""
    texts = sorted(literals)
    if not texts:
        return None
    try:
        return re.compile(_trie_pattern(texts))
    except RecursionError:  # hundreds of literals, each a prefix of the next
        return re.compile("|".join(map(re.escape, reversed(texts))))


def _trie_pattern(texts: list[str]) -> str:
    """Sorted texts as nested groups by prefix. A flat alternation of 800 took 44 us at each `<`, this 0.1."""
    branches = []
    for _, group in groupby(filter(None, texts), key=itemgetter(0)):
        same = list(group)
        pairs = enumerate(zip(same[0], same[-1], strict=False))  # sorted: what these share, all share
        shared = next((i for i, (a, b) in pairs if a != b), len(same[0]))
        branches.append(re.escape(same[0][:shared]) + _trie_pattern([text[shared:] for text in same]))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in texts else "")
