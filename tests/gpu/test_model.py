"""Whole models through the kernels: in the interpreter against the native modules, and without any memory.

The references carry the tests of tests/models; here are the smallest models that have every kind of part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from gguf import GGMLQuantizationType as GgmlType
from torch import Tensor

from isthmus.config import MAX_CAPTURED_ROWS
from isthmus.engine.state import State
from isthmus.formats.kv_cache import KvDtype
from isthmus.gpu.launch import recorded
from isthmus.models.base import Model
from isthmus.modules.on_gpu.step import CHUNK_ROWS, DeviceStep, DeviceSteps
from isthmus.modules.on_gpu.target import Target, Targets
from models import cases, devices, tiny
from models.steps import Session

pytestmark = pytest.mark.usefixtures("one_torch_thread")

VOCAB = 32
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32}
SMALL |= {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_attention_heads": 2}
V3 = {"q_lora_rank": 32, "kv_lora_rank": 32, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2}
V3 |= {
    "topk_group": 1,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
}
V3 |= {"num_key_value_heads": 2, "norm_topk_prob": True}
QWEN = {"num_experts": 4, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 16}
MINIMAX = {"num_local_experts": 4, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 16}
MINIMAX |= {"rope_parameters": cases.HALF_TURNED}
MINIMAX_KEYS = cases.GATE_KEYS | {"rope.dimension_count": 8}
GPT_OSS = {"num_local_experts": 4, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 16}
GPT_OSS |= {"sliding_window": 2, "rope_parameters": cases.GPT_OSS_ROPE}
GPT_OSS_KEYS = cases.GPT_OSS_KEYS | {"attention.sliding_window": 2}
CASES = {
    "qwen3moe": tiny.Case("qwen3moe", cases.gqa(hf.Qwen3MoeConfig, norm_topk_prob=True, **(SMALL | QWEN))),
    "gpt-oss": tiny.Case("gpt-oss", cases.gqa(hf.GptOssConfig, **(SMALL | GPT_OSS)), GPT_OSS_KEYS),
    "deepseek-v3": tiny.Case(
        "deepseek2", cases.mla(hf.DeepseekV3Config, **(SMALL | V3)), {"expert_gating_func": cases.SIGMOID}
    ),
    "minimax-m2": tiny.Case("minimax-m2", cases.gqa(hf.MiniMaxM2Config, **(SMALL | MINIMAX)), MINIMAX_KEYS),
}
# Rows too few for a chunk: what the interpreter does in a few seconds. Chunks reach the wrappers below.
PIECES = [(0, [5, 9, 4]), (1, [6])]


def write(folder: Path, name: str, kind: GgmlType = GgmlType.Q8_0) -> Path:
    case = CASES[name]
    return tiny.write_case(folder / "tiny.gguf", case, tiny.build(case), tiny.matrices_as(kind))


def logits_of(model: Model) -> Tensor:
    return torch.cat(Session(model, 2).step(PIECES))


@pytest.mark.parametrize(
    ("name", "kv_dtype"), [("qwen3moe", "bf16"), ("deepseek-v3", "bf16"), ("deepseek-v3", "q8_0")]
)  # the interpreter takes 5 s for one
def test_a_model_through_the_kernels(name: str, kv_dtype: KvDtype, tmp_path: Path) -> None:
    path = write(tmp_path, name)
    model = devices.native(path)
    routes = devices.recorded(model)
    wanted = logits_of(model)
    got = logits_of(devices.replayed(devices.resident(path, kernels="triton", kv_dtype=kv_dtype), routes))
    assert devices.distance(got, wanted) <= devices.BOUND


def test_under_exact_batching_a_row_through_the_kernels_is_its_own(tmp_path: Path) -> None:
    """A sequence's token alone, and beside another's three: the same bits."""
    model = devices.resident(write(tmp_path, "deepseek-v3"), kernels="triton", exact=True)
    together = Session(model, 2).step(PIECES)[1]
    assert torch.equal(Session(model, 2).step(PIECES[1:])[0], together)


@pytest.mark.parametrize("rows", [2, MAX_CAPTURED_ROWS])
@pytest.mark.parametrize("kind", [GgmlType.Q8_0, GgmlType.BF16])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in CASES),
        ("deepseek-v3", {"exact": True}),
        ("qwen3moe", {"kv_dtype": "q8_0"}),
        ("deepseek-v3", {"kv_dtype": "q8_0"}),
    ],
    ids=str,
)
def test_a_decode_step_reads_no_device_memory(
    name: str, options: dict[str, Any], kind: GgmlType, rows: int, tmp_path: Path
) -> None:
    """On memory that does not exist: whoever looked at a value on the way, or sized anything by one, would
    fail here as it would in the capture of a CUDA graph."""
    path = write(tmp_path, name, kind)
    target, model, state = on_meta(path, **options)
    step = DeviceStep.for_decodes(rows, 2, target)
    batch = Session(devices.native(path), 2, 64).batch([(0, [1]), (1, [2])])
    launched: list[str] = []
    with recorded(lambda kernel, *_: launched.append(kernel.__name__)), torch.inference_mode():
        step.fill(batch.prepare(VOCAB, 4))
        logits = model.compute(DeviceSteps({target: step}), state)
    assert logits.shape == (rows, VOCAB)
    assert logits.device.type == "meta"
    packed = {"_embed", "_linear", "_gate_up", "_down"} if kind == GgmlType.Q8_0 else {"_act_mul"}
    assert packed | {"_rms_norm", "_route", "_decode_split", "_merge", "_weighted_sum"} <= set(launched)


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [*((name, "bf16") for name in CASES), ("qwen3moe", "q8_0"), ("deepseek-v3", "q8_0")],
)
def test_a_chunk_reads_no_device_memory(name: str, kv_dtype: KvDtype, tmp_path: Path) -> None:
    """What the wrappers of prefill ask of their tensors holds for a model's."""
    path = write(tmp_path, name)
    target, model, state = on_meta(path, kv_dtype=kv_dtype)
    batch = Session(devices.native(path), 2, 64).batch([(0, [1] * CHUNK_ROWS), (1, [2])])
    launched: list[str] = []
    with recorded(lambda kernel, *_: launched.append(kernel.__name__)), torch.inference_mode():
        logits = model.compute(DeviceSteps.of(batch.prepare(VOCAB, 4), [target]), state)
    assert logits.shape == (CHUNK_ROWS + 1, VOCAB)
    assert {"_prefill", "_decode_split", "_linear", "_gate_up"} <= set(launched)
    assert ("_read_rows" in launched) == ((name, kv_dtype) == ("deepseek-v3", "q8_0"))


def on_meta(path: Path, *, exact: bool = False, kv_dtype: KvDtype = "bf16") -> tuple[Target, Model, State]:
    """The model with its weights and caches in memory that does not exist."""
    target = Target.of("meta", kernels="triton", exact=exact)
    targets = Targets.one(target, devices.all_resident(path))
    model = devices.on_targets(path, targets, exact=exact, kv_dtype=kv_dtype)
    return target, model, State(model.state_spec(), 4, kv_dtype, [target.device])
