"""Model families on a torch device, the CPU standing in for it: logits near the float model of the same
bytes.

Everything but CUDA itself is run here: modules, weights, steps of every mixture, hand-off, layer split. The
kernels' references compute; tests/gpu runs a whole model through the kernels.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType

from isthmus.config import RunOptions
from isthmus.errors import UnsupportedError, UsageError
from isthmus.formats.spec import by_name
from isthmus.models.base import load_model
from isthmus.modules.on_gpu.target import Target, Targets
from isthmus.modules.split import ExpertSplit
from isthmus.weights.source import open_weights
from models import devices, tiny
from models.devices import BOUND, distance, run
from models.test_quantised import two_files

pytestmark = pytest.mark.usefixtures("one_torch_thread")

# Family and format of its matrices; K-quants need rows of 256 columns.
FAMILIES = [
    ("llama-biased", "BF16"),
    ("llama3-tied", "Q8_0"),
    ("mixtral", "Q8_0"),
    ("qwen2moe", "F32"),
    ("qwen3moe", "F16"),
    ("gpt-oss", "MXFP4"),  # window, sinks, biases and clamped activation, by the kernels' references
    ("gpt-oss", "F16"),  # the same by torch: experts in a format no kernel unpacks
    ("deepseek-v2-lite", "Q8_0"),  # joined kv_b, queries projected directly
    ("deepseek-v2", "F32"),  # groups by their best
    ("deepseek-v3", "BF16"),  # sigmoid, selection bias, groups by their two best
    ("glm4moe", "Q8_0"),  # half of each head turns
    ("minimax-m2", "BF16"),  # norms over all heads together
    ("ernie4_5-moe", "Q8_0"),  # softmax with a selection bias
]
RESIDUALS = [torch.bfloat16, torch.float32]
WIDE = {
    "k-quants": ["q4_k", "q5_k", "q6_k"],
    "dequantised": ["q5_1", "q4_k", "iq4_xs"],
    "as-q8_0": ["q4_0", "q6_k", "q5_0", "iq4_nl"],
}


def write(folder: Path, name: str, format_name: str) -> tuple[Path, Path]:
    """The model in a format, and in fp32 with the values that gguf-py reads out of the same bytes."""
    case, kind = tiny.CASES[name], GgmlType[format_name]
    model, types = tiny.build(case), tiny.matrices_as(kind)
    tensors, keys = tiny.tensors_of(case, model), tiny.keys_of(case, model.config)
    floats = {
        key: gguf.quants.dequantize(gguf.quants.quantize(values, types(key, values)), types(key, values))
        for key, values in tensors.items()
    }
    return (
        tiny.write(folder / "blocks.gguf", case.arch, keys, tensors, types),
        tiny.write(folder / "floats.gguf", case.arch, keys, floats, tiny.all_f32),
    )


def check(path: Path, floats: Path) -> None:
    """Both strategies against the float model, natively: its routes taken, and nearly always chosen."""
    model = devices.native(floats)
    routes = devices.recorded(model)
    wanted = run(model)
    assert devices.agreement(devices.resident(path), routes) >= 0.97
    assert distance(run(devices.replayed(devices.resident(path), routes)), wanted) <= BOUND
    for residual in RESIDUALS if routes else []:
        model, hand = devices.split(path, residual)
        assert distance(run(devices.replayed(model, routes)), wanted) <= BOUND
        hand.close()


@pytest.mark.parametrize(("name", "format_name"), FAMILIES)
def test_logits_are_near_the_float_models(name: str, format_name: str, tmp_path: Path) -> None:
    check(*write(tmp_path, name, format_name))


@pytest.mark.parametrize("name", tiny.WIDE_CASES)
@pytest.mark.parametrize("formats", WIDE.values(), ids=list(WIDE))
def test_every_matrix_may_have_another_format(name: str, formats: list[str], tmp_path: Path) -> None:
    check(*two_files(tmp_path, name, [by_name(format_name) for format_name in formats]))


# What is zeroed in a model's file, after which its logits are far outside the bound.
ZEROED = [
    ("gpt-oss", "blk.1.attn_sinks.weight"),
    ("gpt-oss", "blk.0.ffn_gate_inp.bias"),
    ("gpt-oss", "blk.1.ffn_gate_exps.bias"),
    ("gpt-oss", "blk.0.ffn_down_exps.bias"),
    ("qwen2moe", "blk.1.attn_output.weight"),
    ("qwen2moe", "blk.0.ffn_norm.weight"),
    ("qwen2moe", "blk.0.ffn_gate_inp.weight"),
    ("qwen2moe", "blk.0.ffn_gate_inp_shexp.weight"),
    ("qwen2moe", "blk.1.ffn_down_shexp.weight"),
    ("qwen2moe", "blk.0.ffn_down_exps.weight[1]"),
    ("deepseek-v3", "blk.2.attn_k_b.weight"),
    ("deepseek-v3", "blk.0.attn_v_b.weight"),
    ("deepseek-v3", "blk.1.attn_kv_a_norm.weight"),
    ("deepseek-v3", "blk.1.exp_probs_b.bias"),
    ("deepseek-v3", "blk.2.ffn_up_exps.weight[9]"),
    ("deepseek-v3", "blk.0.ffn_down.weight"),
    ("glm4moe", "blk.1.attn_k_norm.weight"),
    ("minimax-m2", "blk.0.attn_q_norm.weight"),
    ("minimax-m2", "blk.1.attn_k_norm.weight"),
]


@pytest.mark.parametrize(("name", "zeroed"), ZEROED)
def test_a_zeroed_part_is_seen(name: str, zeroed: str, tmp_path: Path) -> None:
    case = tiny.CASES[name]
    model = tiny.build(case)
    tensors, keys = tiny.tensors_of(case, model), tiny.keys_of(case, model.config)
    wanted = run(devices.native(tiny.write(tmp_path / "whole.gguf", case.arch, keys, tensors, tiny.all_f32)))
    tensor_name, _, expert = zeroed.rstrip("]").partition("[")
    mutated = tensors[tensor_name].copy()
    mutated[int(expert) if expert else slice(None)] = 0
    path = tiny.write(
        tmp_path / "zeroed.gguf", case.arch, keys, tensors | {tensor_name: mutated}, tiny.all_f32
    )
    assert distance(run(devices.resident(path)), wanted) > 10 * BOUND


def halves(path: Path) -> Targets:
    """Layers before the last on one target, the last with norm and head on another, each with its
    hand-off."""
    first, second = (Target.of("cpu") for _ in range(2))
    layers = len(devices.native(path).layers)  # type: ignore[attr-defined]
    last = (f"blk.{layers - 1}.", "output")
    return Targets(lambda name: second if name.startswith(last) else first, devices.all_resident(path))


@pytest.mark.parametrize("name", ["llama3-tied", "qwen3moe", "deepseek-v3"])
def test_a_layer_split_gives_the_bits_of_one_device(name: str, tmp_path: Path) -> None:
    """The tied model goes back to the first device for its head."""
    path, _ = write(tmp_path, name, "Q8_0")
    model = devices.on_targets(path, halves(path))
    assert len(model.stages) == (3 if name == "llama3-tied" else 2)  # type: ignore[attr-defined]
    assert torch.equal(run(model), run(devices.resident(path)))


def test_rows_cross_in_the_residuals_dtype_and_are_counted(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "deepseek-v3", "Q8_0")
    for residual, nbytes in ((torch.bfloat16, 2), (torch.float32, 4)):
        model, hand = devices.split(path, residual)
        run(model)
        assert hand.handoff is not None
        counted = hand.handoff.counters()
        rows = sum(len(piece) for pieces in devices.STEPS for _, piece in pieces)
        layers, top_k = 2, 4
        assert counted.submits == counted.waits == layers * len(devices.STEPS)
        assert counted.bytes_x == counted.bytes_y == layers * rows * model.config.hidden * nbytes
        assert counted.bytes_routing == layers * rows * top_k * (4 + 4)
        hand.close()


def test_what_a_device_does_not_keep_is_refused(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "qwen3moe", "Q8_0")
    target = Target.of("cpu")
    targets = Targets.one(target, devices.all_resident(path))
    with pytest.raises(UsageError, match="kv_dtype f32 is for the CPU"):
        load_model(open_weights(path), RunOptions(kv_dtype="f32"), targets=targets)
    with pytest.raises(ValueError, match="exact_batching is True, and its target's exact False"):
        load_model(open_weights(path), RunOptions(exact_batching=True), targets=targets)
    with pytest.raises(ValueError, match="its target needs a hand-off"):
        devices.on_targets(path, Targets.one(target))
    hand = ExpertSplit("inline", 512, {"dtype": "f32"})
    with pytest.raises(ValueError, match="needs dtype 'bf16'"):
        devices.on_targets(path, Targets.one(Target.of("cpu", split=hand)))
    some = {0: [0, -1, 1, -1, -1, -1, -1, -1]}
    with pytest.raises(UnsupportedError, match="layer 0 has 2 of its 8 experts on cpu"):
        devices.on_targets(path, Targets.one(target, some))
    with pytest.raises(ValueError, match="the residual is"):
        Target.of("cpu", residual=torch.float16)
