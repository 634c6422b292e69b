"""The table of `isthmus bench --ops`: where a decode step's time goes, and how near each comes to the limit.

Bytes of an operation are those of its tensors in the file's header, of attention those of the cache. Under
`cpu` alone: a device reads its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from isthmus.cli.bench_sizes import lines
from isthmus.placement.sizes import is_vector, ram_read

if TYPE_CHECKING:
    from isthmus.weights.source import RawTensor, WeightSource


def bytes_by_kind(source: WeightSource) -> dict[str, float]:
    """Kind of operator -> bytes of weights that it reads for one decoded token, on the CPU."""
    found: dict[str, float] = {}
    for tensor in source.tensors.values():
        kind = _kind(tensor, tied="output.weight" not in source.tensors)
        found[kind] = found.get(kind, 0.0) + ram_read(tensor, source)
    return found


def _kind(tensor: RawTensor, *, tied: bool) -> str:
    """As the native operators are called: shared experts run in the routed ones' operator."""
    if is_vector(tensor):
        return "norm"
    if tensor.name == "token_embd.weight" and not tied:
        return "embedding"
    if any(word in tensor.name for word in ("_exps.", "_shexp.")):
        return "experts"
    if any(word in tensor.name for word in ("attn_k_b.", "attn_v_b.", "attn_kv_b.")):
        return "head_linear"
    return "linear"


def rates(result: dict[str, Any], source: WeightSource) -> dict[str, float]:
    """Kind -> GB/s while it runs, of those that read weights or the cache; none unless all is on the CPU."""
    if result["strategy"] != "cpu":
        return {}
    nbytes = bytes_by_kind(source)
    nbytes["attention"] = result["bytes_per_token"] - sum(nbytes.values())
    seconds = {kind: share / result["decode_tok_s"] for kind, share in result["step_shares"].items()}
    kinds = ("linear", "head_linear", "experts", "attention")
    return {k: nbytes[k] / seconds[k] / 1e9 for k in kinds if seconds.get(k) and nbytes.get(k)}


def table(result: dict[str, Any], *, markdown: bool) -> Iterator[str]:
    """Of one decoded token; the limit is what plain reading gave between the slices."""
    token_ms = 1e3 / result["decode_tok_s"]
    limit = result["read_gb_s"] / result["decode_share"]
    rows = [["operation", "ms a token", "share", "GB/s", "of the limit"]]
    for kind, share in sorted(result["step_shares"].items(), key=lambda item: -item[1]):
        rate = result["step_gb_s"].get(kind)
        more = [f"{rate:.1f}", f"{rate / limit:.0%}"] if rate else ["", ""]
        rows.append([kind, f"{share * token_ms:.3f}", f"{share:.1%}", *more])
    yield from lines(rows, markdown=markdown)
