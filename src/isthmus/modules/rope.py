"""Rotary position embedding: the frequencies and scales, once per model. Applying them is a native operation.

A pair (a, b) of a head's values at position p turns by the angle p * f_i. `interleaved` pairs are
neighbours (2i, 2i + 1), ggml's "norm" order, for which the llama converter permutes Q and K; otherwise
(i, i + dim / 2), ggml's "neox".

YaRN follows arXiv 2309.00071 with transformers' rounding (modeling_rope_utils.py,
_compute_yarn_parameters); GGUF adds its own conventions, noted at the functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from isthmus.modules.loader import Loader
from isthmus.native import rows
from isthmus.weights.source import RawTensor


@dataclass(frozen=True)
class RopeConfig:
    dim: int  # values of a head that turn
    base: float
    interleaved: bool
    scaling: Literal["none", "linear", "yarn"] = "none"
    factor: float = 1.0  # context extension
    original_tokens: int = 0  # context before the extension (yarn)
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    log_multiplier: float = 0.0  # 0.1 * mscale_all_dim of DeepSeek's config (yarn)
    truncate: bool = True  # to whole pairs, where the ramp of kept frequencies begins and ends (yarn)


def frequencies(config: RopeConfig, factors: Tensor | None = None) -> Tensor:
    """f_i, float32 [dim / 2], radians per position; `factors` (rope_freqs.weight, same shape) divide them."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float64) / config.dim
    freqs = config.base**-exponents
    if factors is not None:
        freqs = freqs / factors.double()
    if config.scaling == "linear":
        freqs = freqs / config.factor
    elif config.scaling == "yarn":
        kept = _kept_share(config)
        freqs = freqs * kept + freqs / config.factor * (1 - kept)
    return freqs.float()


def magnitude(config: RopeConfig) -> float:
    """What multiplies cos and sin: YaRN's attention temperature, except where `attention_scale` carries it.

    With a log multiplier the file means mscale = mscale_all_dim, a ratio of 1, as in all DeepSeek and Kimi.
    """
    if config.scaling != "yarn" or config.log_multiplier:
        return config.attention_factor
    return config.attention_factor * (1.0 + 0.1 * math.log(max(config.factor, 1.0)))


def attention_scale(config: RopeConfig, head_dim: int) -> float:
    """What multiplies q.k before the softmax: head_dim^-0.5, times mscale^2 with a log multiplier.

    GGUF stores 0.1 * mscale_all_dim; mscale = 1 + multiplier * ln(factor) is DeepSeek's yarn_get_mscale.
    """
    mscale = 1.0
    if config.scaling == "yarn":
        mscale += config.log_multiplier * math.log(max(config.factor, 1.0))
    return mscale * mscale / math.sqrt(head_dim)


def _kept_share(config: RopeConfig) -> Tensor:
    """1 where a pair turns so often in the original context that it keeps its frequency, down to 0."""

    def pair_turning(rotations: float) -> float:
        turns = config.original_tokens / (rotations * 2 * math.pi)
        return config.dim * math.log(turns) / (2 * math.log(config.base))

    low, high = pair_turning(config.beta_fast), pair_turning(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    ramp = (torch.arange(config.dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
    return 1 - ramp.clamp(0, 1)


class Rope:
    """cos and sin of every position the run can reach, fp32 [positions, dim / 2], shared by all layers."""

    def __init__(self, config: RopeConfig, factors: RawTensor | None, positions: int) -> None:
        self.config = config
        self.positions = positions
        self._factors = factors
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def style(self) -> Literal["norm", "neox"]:
        return "norm" if self.config.interleaved else "neox"

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin in a device's memory, once for all its layers."""
        if device not in self._on:
            self._on[device] = (self.cos.to(device), self.sin.to(device))
        return self._on[device]

    def check(self, end_position: int) -> None:
        """ValueError unless the tables have all positions before this one. For devices; native code looks
        at each row."""
        if end_position > self.positions:
            raise ValueError(f"position {end_position - 1} of a run of {self.positions} positions")

    def load(self, loader: Loader) -> None:
        freqs = frequencies(self.config, loader.vector(self._factors) if self._factors else None)
        del self._factors
        angles = torch.arange(self.positions, dtype=torch.float64)[:, None] * freqs.double()
        scale = magnitude(self.config)
        self.cos = (angles.cos() * scale).float()
        self.sin = (angles.sin() * scale).float()
        self.native = rows.RopeTable(
            self.cos.data_ptr(),
            self.sin.data_ptr(),
            self.positions,
            self.config.dim,
            self.style,
        )
