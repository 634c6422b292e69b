"""Tiny random models: transformers is the oracle, and a GGUF file with the same weights is what we load.

The conversion is written here from llama.cpp's published conventions, tensor names from gguf-py's own map,
so that nothing of the engine under test takes part in making its input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as hf
from gguf import GGMLQuantizationType as GgmlType
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from isthmus.formats.spec import FormatSpec
from isthmus.weights.gguf_header import ValueType
from isthmus.weights.gguf_writer import TensorPlan, write_gguf
from models.cases import CASES as CASES
from models.cases import VOCAB as VOCAB
from models.cases import WIDE_CASES as WIDE_CASES
from models.cases import Case as Case

Tensors = dict[str, np.ndarray]
TypeChoice = Callable[[str, np.ndarray], GgmlType]


def build(case: Case, seed: int = 0) -> Any:
    """The transformers model: matrices of std fan_in^-0.5, embedding of std 1, norms, biases, selection
    bias random. Of gpt-oss a sink weighs as much as some keys, and some hidden activations pass the clamp.
    """
    config = case.config()
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if "embed_tokens" in name:
                tensor.copy_(noise)
            elif name.endswith("norm.weight"):
                tensor.copy_(1 + 0.2 * noise)
            elif name.endswith("sinks"):
                tensor.copy_(2 + noise)
            elif "experts.gate_up_proj_bias" in name:
                tensor.copy_(4 * noise)
            elif "moe_statics" in name:  # beside scores of a softmax
                tensor.copy_(0.05 * noise)
            elif tensor.dim() == 1 or name.endswith("bias"):
                tensor.copy_(0.2 * noise)
            elif case.arch == "gpt-oss" and "experts." in name:  # the only ones that are transposed
                tensor.copy_(noise * tensor.shape[1] ** -0.5)
            else:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)
    model.tie_weights()
    return model


def round_to_bf16(model: Any) -> Any:
    """The same model with matrices that bf16 holds exactly, still computing in fp32."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() > 1:
                tensor.copy_(tensor.bfloat16().float())
    return model


def tensors_of(case: Case, model: Any) -> Tensors:
    """The model's weights under their GGUF names, as llama.cpp's converter lays them out."""
    config = model.config
    archs = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(archs[case.arch], config.num_hidden_layers)
    state = dict(model.state_dict())
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    tensors: Tensors = {}
    for name, tensor in state.items():
        split = _split_transposed if case.arch == "gpt-oss" else _split_experts
        for hf_name, part in split(name, tensor):
            gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
            assert gguf_name, hf_name
            tensors[gguf_name] = _permuted(case, config, gguf_name, part).contiguous().numpy()
    _store_kv_b(case, config, tensors)
    if config.rope_parameters["rope_type"] == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
        plain = config.rope_parameters["rope_theta"] ** -(
            torch.arange(0, config.head_dim, 2) / config.head_dim
        )
        tensors["rope_freqs.weight"] = (plain / scaled).numpy()
    return tensors


def _split_experts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        base = name.removesuffix("gate_up_proj")
        return [(f"{base}gate_proj.weight", gate), (f"{base}up_proj.weight", up)]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", tensor)]
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if "moe_statics" in name:  # [1, experts]
        return [(name.replace("gate.moe_statics", "moe_statics"), tensor[0])]
    return [(name, tensor)]


def _split_transposed(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """gpt-oss: experts [E, in, out], gate and up alternate in the last dimension, of biases too."""
    if name.endswith("sinks"):
        return [(f"{name}.weight", tensor)]
    base, found, last = name.rpartition("experts.")
    if not found:
        return [(name, tensor)]
    suffix = "bias" if last.endswith("_bias") else "weight"
    tensor = tensor if suffix == "bias" else tensor.transpose(1, 2)
    if last.startswith("down_proj"):
        return [(f"{base}experts.down_proj.{suffix}", tensor)]
    return [
        (f"{base}experts.gate_proj.{suffix}", tensor[:, ::2]),
        (f"{base}experts.up_proj.{suffix}", tensor[:, 1::2]),
    ]


def _permuted(case: Case, config: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Llama's rope turns neighbouring pairs, transformers' the halves of a head: Q and K rows move
    accordingly.
    """
    if case.arch != "llama" or not ("attn_q." in name or "attn_k." in name):
        return tensor
    heads = config.num_attention_heads if "attn_q." in name else config.num_key_value_heads
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _store_kv_b(case: Case, config: Any, tensors: Tensors) -> None:
    """k_b [heads, kv_lora, nope] and v_b [heads, v, kv_lora] out of the joined kv_b [heads * (nope + v),
    kv_lora].
    """
    for i in range(config.num_hidden_layers if case.arch == "deepseek2" else 0):
        joined = tensors[f"blk.{i}.attn_kv_b.weight"]
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        per_head = joined.reshape(heads, -1, config.kv_lora_rank)
        if case.layout == "split":
            del tensors[f"blk.{i}.attn_kv_b.weight"]
        if case.layout != "joined":
            k_b = per_head[:, :nope].swapaxes(1, 2)
            v_b = per_head[:, nope:]
            if case.layout == "both":  # written two-dimensional by the first converters that split
                k_b, v_b = k_b.reshape(-1, nope), v_b.reshape(-1, config.kv_lora_rank)
            tensors[f"blk.{i}.attn_k_b.weight"] = np.ascontiguousarray(k_b)
            tensors[f"blk.{i}.attn_v_b.weight"] = np.ascontiguousarray(v_b)


# What says how wide an expert is by a key of its own.
WITH_INNER = {
    "qwen2moe",
    "qwen3moe",
    "deepseek2",
    "glm4moe",
    "minimax-m2",
    "dots1",
    "ernie4_5-moe",
    "gpt-oss",
}


def keys_of(case: Case, config: Any) -> dict[str, Any]:
    """The architecture's metadata keys, without their prefix."""
    c = config
    keys: dict[str, Any] = {
        "vocab_size": c.vocab_size,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.freq_base": float(c.rope_parameters["rope_theta"]),
    }
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    if case.arch == "deepseek2":
        keys |= _mla_keys(case, c)
    elif head_dim * c.num_attention_heads != c.hidden_size:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if case.arch == "llama":
        keys["rope.dimension_count"] = head_dim
    counts = (getattr(c, name, None) for name in ("n_routed_experts", "num_experts", "num_local_experts"))
    if experts := next(filter(None, counts), None):
        keys |= {"expert_count": experts, "expert_used_count": c.num_experts_per_tok}
    if case.arch in WITH_INNER:
        keys["expert_feed_forward_length"] = getattr(c, "moe_intermediate_size", c.intermediate_size)
    if case.arch in ("deepseek2", "glm4moe", "dots1"):
        keys |= _shared_keys(c)
    if case.arch == "qwen2moe":
        keys["expert_shared_feed_forward_length"] = c.shared_expert_intermediate_size
    return keys | case.keys


def _shared_keys(c: Any) -> dict[str, Any]:
    return {
        "leading_dense_block_count": c.first_k_dense_replace,
        "expert_shared_count": c.n_shared_experts,
        "expert_weights_scale": float(c.routed_scaling_factor),
        "expert_weights_norm": bool(c.norm_topk_prob),
    }


def _mla_keys(case: Case, c: Any) -> dict[str, Any]:
    full = c.qk_nope_head_dim + c.qk_rope_head_dim
    keys = {"attention.kv_lora_rank": c.kv_lora_rank, "rope.dimension_count": c.qk_rope_head_dim}
    if case.layout == "split":  # llama.cpp since it absorbs: the cache's row as one shared head
        keys |= {"attention.key_length_mla": full, "attention.value_length_mla": c.v_head_dim}
        keys |= {"attention.key_length": c.kv_lora_rank + c.qk_rope_head_dim}
        keys |= {"attention.value_length": c.kv_lora_rank, "attention.head_count_kv": 1}
    else:  # before, and ik_llama.cpp: the heads' own sizes
        keys |= {"attention.key_length": full, "attention.value_length": c.v_head_dim}
    if c.q_lora_rank:
        keys["attention.q_lora_rank"] = c.q_lora_rank
    if (c.n_group or 1) > 1:
        keys |= {"expert_group_count": c.n_group, "expert_group_used_count": c.topk_group}
    return keys


def write(path: Path, arch: str, keys: dict[str, Any], tensors: Tensors, types: TypeChoice) -> Path:
    """A GGUF file; `types` chooses each tensor's type, among those that gguf-py can quantise to."""
    return write_raw(
        path, arch, keys, {k: (gguf.quants.quantize(v, types(k, v)), types(k, v)) for k, v in tensors.items()}
    )


@dataclass(frozen=True)
class Stored:
    """A tensor as a file holds it; data: its bytes in C order, in an array of any type."""

    format: FormatSpec
    shape: tuple[int, ...]
    data: np.ndarray


def write_stored(path: Path, arch: str, keys: dict[str, Any], tensors: dict[str, Stored]) -> Path:
    """A GGUF file by the package's own writer, which knows formats that gguf-py lacks."""
    kinds = {bool: ValueType.BOOL, int: ValueType.UINT32, float: ValueType.FLOAT32, str: ValueType.STRING}
    metadata: dict[str, tuple[ValueType, Any]] = {"general.architecture": (ValueType.STRING, arch)}
    metadata |= {f"{arch}.{key}": (kinds[type(value)], value) for key, value in keys.items()}
    plans = [
        TensorPlan(name, t.shape, t.format, lambda t=t: [np.ascontiguousarray(t.data).tobytes()])
        for name, t in tensors.items()
    ]
    with path.open("wb") as file:
        write_gguf(file, metadata, plans)
    return path


def write_raw(
    path: Path, arch: str, keys: dict[str, Any], tensors: dict[str, tuple[np.ndarray, GgmlType]]
) -> Path:
    """The same for data that is already in blocks: uint8 [..., row bytes], or float32 for F32."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        add[type(value)](f"{arch}.{key}", value)
    for name, (data, ggml_type) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=None if ggml_type == GgmlType.F32 else ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def all_f32(name: str, values: np.ndarray) -> GgmlType:
    return GgmlType.F32


def matrices_as(ggml_type: GgmlType) -> TypeChoice:
    """As llama.cpp quantises: vectors and the router stay F32."""

    def choose(name: str, values: np.ndarray) -> GgmlType:
        return ggml_type if is_quantised(name, values) else GgmlType.F32

    return choose


def is_quantised(name: str, values: np.ndarray) -> bool:
    return values.ndim > 1 and "ffn_gate_inp" not in name and not name.endswith(".bias")


def write_case(path: Path, case: Case, model: Any, types: TypeChoice = all_f32) -> Path:
    return write(path, case.arch, keys_of(case, model.config), tensors_of(case, model), types)
