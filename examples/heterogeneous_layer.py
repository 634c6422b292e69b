"""One layer of DeepSeek-V3 over two devices: what crosses between them, and what would otherwise.

python examples/heterogeneous_layer.py [TOKENS] [EXPERTS] [DEVICE]

The layer has 256 experts of 7168 x 2048, 8 of them chosen, and a shared one: 6.4 GB. Where RAM is short,
fewer experts do. DEVICE: where all but the routed experts is, such as cuda:0; the CPU if it is left out.
"""

from __future__ import annotations

import sys
from dataclasses import fields

import psutil
import torch

from isthmus import HeterogeneousMoELayer

HIDDEN, INNER, EXPERTS, TOP_K = 7168, 2048, 256, 8
EXPERT_BYTES = 3 * HIDDEN * INNER * 144 // 256  # Q4_K: 144 bytes for 256 weights


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    fit = int(psutil.virtual_memory().available * 0.8) // EXPERT_BYTES
    experts = int(sys.argv[2]) if len(sys.argv) > 2 else max(TOP_K, min(EXPERTS, fit))
    device = sys.argv[3] if len(sys.argv) > 3 else None
    layer = HeterogeneousMoELayer(HIDDEN, INNER, experts, TOP_K, num_shared_experts=1, device=device)
    x = torch.randn(1, tokens, HIDDEN, dtype=torch.bfloat16)
    layer(x)  # memory and caches as in use
    y, metrics = layer(x)
    print(f"{experts} experts of {HIDDEN} x {INNER} in Q4_K, {TOP_K} chosen; y {tuple(y.shape)} {y.dtype}")
    for field in fields(metrics):
        value = getattr(metrics, field.name)
        print(f"  {field.name:28} {value:,}" if isinstance(value, int) else f"  {field.name:28} {value:,.4g}")
    print(f"  {'activation_transfer_bytes':28} {metrics.activation_transfer_bytes:,}")
    print(f"  {'bandwidth_savings_ratio':28} {metrics.bandwidth_savings_ratio:,.0f}")
    layer.close()


if __name__ == "__main__":
    main()
