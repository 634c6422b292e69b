"""Quantisations by their names: which format each tensor of a model gets, as llama.cpp's quantiser decides.

A name is one of the mixes that published files are (Q4_K_M), or one format for all matrices. Norms, biases
and the router stay fp32 in each. Source of the mixes: src/llama-quant.cpp.
"""

from __future__ import annotations

import difflib
import re

from isthmus.errors import UsageError
from isthmus.formats.spec import FORMATS, FormatSpec, by_name

MIX = "q4_k_m"
# Mix -> the format of most matrices.
MIXES = {"q3_k_m": "q3_k", MIX: "q4_k", "q5_k_m": "q5_k", "mxfp4_moe": "mxfp4"}
# Every format weights come in, and the mixes that most published files are.
QUANTS = (*MIXES, *(spec.name for spec in FORMATS.values() if spec.runnable))
# From the most bits to the fewest: what a model that does not fit is tried in.
LADDER = (
    "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "q3_k_m", "iq3_xxs", "q2_k", "iq2_xs", "iq2_xxs",
    "iq1_s",
)  # fmt: skip

# In these nobody quantises embedding, head or the halves of kv_b further.
WIDE = ("f32", "f16", "bf16", "q8_0")
# What llama.cpp's quantiser takes for rows that a 256-column format cannot hold; any other becomes q8_0.
FALLBACK = {"q4_k": "q5_0", "q5_k": "q5_0", "q6_k": "q8_0", "q2_k": "iq4_nl", "q3_k": "iq4_nl"}
FALLBACK |= {name: "iq4_nl" for name in ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")}
FALLBACK |= {"iq4_xs": "iq4_nl"}


def check_quant(name: str, *, what: str = "") -> str:
    """The name in lower case; UsageError with the nearest if there is none. `what` begins the message."""
    quant = name.lower().removeprefix("ud-")
    if quant not in QUANTS:
        near = difflib.get_close_matches(quant, QUANTS, n=3, cutoff=0.5)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise UsageError(f"{what}no quant is called {name!r}{hint}; there are {', '.join(QUANTS)}")
    return quant


def tensor_format(name: str, shape: tuple[int, ...], quant: str, *, layers: int, experts: int) -> FormatSpec:
    """The format of the tensor `name` in a model of so many layers, and experts a layer, as `quant`."""
    kind = name.split(".")[-2] if "." in name else name
    if len(shape) == 1 or name.endswith(".bias") or kind == "ffn_gate_inp":
        return by_name("f32")
    layer = re.match(r"blk\.(\d{1,6})\.", name)
    spec = by_name(_matrix(kind, int(layer[1]) if layer else 0, quant, layers, experts))
    if shape[-1] % spec.block_columns:
        spec = by_name(FALLBACK.get(spec.name, "q8_0"))
    return spec if shape[-1] % spec.block_columns == 0 else by_name("f16")


def _matrix(kind: str, layer: int, quant: str, layers: int, experts: int) -> str:
    if quant in WIDE:
        return quant
    if quant == "mxfp4_moe":
        return "mxfp4" if kind.endswith("_exps") else "q8_0"
    if kind in ("attn_k_b", "attn_v_b"):
        # Rows of 128 columns, which no 256-column format holds: published files have these in 8 bits.
        return "q8_0"
    if kind == "token_embd":
        return MIXES.get(quant, "q4_k")
    if kind == "output":
        return "q6_k"
    return _in_mix(kind, layer, quant, layers, experts) if quant in MIXES else quant


def _in_mix(kind: str, layer: int, quant: str, layers: int, experts: int) -> str:
    if experts == 8:  # Mixtral: attention is so small a part that it gets more bits
        if kind in ("attn_v", "attn_k"):
            return "q8_0"
        if kind == "attn_output":
            return "q5_k"
    more = kind == "attn_v" or kind.startswith("ffn_down")
    if quant == "q3_k_m":
        few = layer < (2 if kind == "attn_v" else layers // 16)
        return ("q5_k" if few else "q4_k") if more or kind == "attn_output" else "q3_k"
    return "q6_k" if more and _more_bits(layer, layers) else MIXES[quant]


def _more_bits(layer: int, layers: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
