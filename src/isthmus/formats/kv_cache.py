"""The types of a cache's values, and the bytes of a row of them. No torch.

A row is a key, a value or a latent: `width` values of one token and kv head. q8_0 has ggml's Q8_0 values, an
int8 code times the fp16 scale of 32 neighbours; codes and scales stand apart (csrc/rows/args.h has the
layout). It is the one that rounds more than the model's own bf16 does: approximate.
"""

from __future__ import annotations

from typing import Literal

KvDtype = Literal["bf16", "f32", "q8_0"]
KV_DTYPES: tuple[KvDtype, ...] = ("bf16", "f32", "q8_0")
APPROXIMATE: tuple[KvDtype, ...] = ("q8_0",)

# Of the demo model's keys (values) scales of 16, 32 and 64 columns lose 0.62, 0.80 and 1.09 % (0.52, 0.62 and
# 0.72 %), rms; 64 would save 3 % of the bytes, 16 cost 6 %. And 32 have the values that users of q8_0 know.
SCALE_COLUMNS = 32


def row_bytes(kv_dtype: KvDtype, width: int) -> int:
    """Bytes of one row."""
    if kv_dtype == "q8_0":
        return width + 2 * -(-width // SCALE_COLUMNS)
    return width * {"bf16": 2, "f32": 4}[kv_dtype]
