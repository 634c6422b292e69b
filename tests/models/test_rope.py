"""Rope's frequencies and scales against transformers' own, for every scaling a GGUF can ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from isthmus.modules.rope import RopeConfig, attention_scale, frequencies, magnitude


def yarn(**changes: Any) -> RopeConfig:
    config = {"dim": 64, "base": 10000.0, "interleaved": False, "scaling": "yarn", "factor": 40.0}
    return RopeConfig(**(config | {"original_tokens": 4096} | changes))


def theirs(**rope: Any) -> tuple[torch.Tensor, float]:
    parameters = {"rope_theta": 10000.0, "original_max_position_embeddings": 4096} | rope
    config = hf.LlamaConfig(hidden_size=64, num_attention_heads=1, head_dim=64, rope_parameters=parameters)
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device="cpu")


@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
def test_yarn(factor: float) -> None:
    wanted, scale = theirs(rope_type="yarn", factor=factor)
    torch.testing.assert_close(frequencies(yarn(factor=factor)), wanted, rtol=1e-6, atol=0)
    assert magnitude(yarn(factor=factor)) == pytest.approx(scale, rel=1e-6)


def test_yarn_with_other_betas_and_an_attention_factor() -> None:
    wanted, scale = theirs(rope_type="yarn", factor=8.0, beta_fast=16.0, beta_slow=2.0)
    config = yarn(factor=8.0, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25)
    torch.testing.assert_close(frequencies(config), wanted, rtol=1e-6, atol=0)
    assert magnitude(config) == pytest.approx(1.25 * scale, rel=1e-6)


def test_yarn_whose_ramp_is_not_rounded_to_pairs() -> None:
    rope = {"rope_type": "yarn", "factor": 32.0, "rope_theta": 150000.0}
    wanted, _ = theirs(**rope, truncate=False)
    config = yarn(base=150000.0, factor=32.0, truncate=False)
    torch.testing.assert_close(frequencies(config), wanted, rtol=1e-6, atol=0)
    assert not torch.allclose(wanted, theirs(**rope)[0], rtol=1e-3)


@pytest.mark.parametrize("mscale", [0.707, 1.0])
def test_deepseek_carries_yarns_temperature_in_the_attention_scale(mscale: float) -> None:
    rope = {"rope_type": "yarn", "factor": 40.0, "mscale": mscale, "mscale_all_dim": mscale}
    _, scale = theirs(**rope)
    config = yarn(log_multiplier=0.1 * mscale)
    assert magnitude(config) == pytest.approx(scale, rel=1e-6) == 1.0
    assert attention_scale(config, 192) == pytest.approx(yarn_apply_mscale(rope, 192**-0.5), rel=1e-6)


def test_linear_and_llama3() -> None:
    plain = RopeConfig(dim=64, base=10000.0, interleaved=True)
    default = frequencies(plain)
    linear = RopeConfig(dim=64, base=10000.0, interleaved=True, scaling="linear", factor=4.0)
    torch.testing.assert_close(frequencies(linear), theirs(rope_type="linear", factor=4.0)[0])
    wanted, scale = theirs(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    torch.testing.assert_close(frequencies(plain, factors=default / wanted), wanted)
    assert magnitude(plain) == scale == 1.0
