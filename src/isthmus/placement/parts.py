"""A model as a plan sees it: modules with their bytes on either kind of device, experts, cache. No weights.

A module is what lives on one device as a whole: blk.3.attn, blk.3.ffn_exps, token_embd. Its path is the
common beginning of its tensors' names, as llama.cpp has them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from isthmus.placement.sizes import (
    attention_widths,
    gpu_bytes,
    gpu_read,
    is_vector,
    key,
    kv_layer_bytes,
    ram_bytes,
    ram_read,
    stays_packed,
)
from isthmus.weights.mtp import decoder_layers

if TYPE_CHECKING:
    from isthmus.config import RunOptions
    from isthmus.weights.source import RawTensor, WeightSource

EXPERTS = "ffn_exps"

# The first word of a tensor's name in its layer -> its module, by its beginning, the first that fits; a name
# that ends in _exps or _shexp is the routed or shared experts'. Any other is a module of its own.
_MODULES = {
    "attn_": "attn",
    "ffn_gate_inp": "ffn_gate_inp",
    "exp_probs_b": "ffn_gate_inp",
    "ffn_norm": "ffn_norm",
}
_DENSE = ("ffn_gate", "ffn_up", "ffn_down")


@dataclass
class Part:
    """A module's bytes once loaded, those read of it for one decoded token, and what is multiplied by.

    layer: None for what stands before or after all layers. count, used: its experts, 0 of a dense module.
    """

    path: str
    layer: int | None
    ram_bytes: int = 0
    gpu_bytes: int = 0
    ram_read: float = 0.0
    gpu_read: float = 0.0
    count: int = 0
    used: int = 0
    weights: int = 0  # in matrices: of an embedding that is not the head too, none
    formats: dict[str, int] = field(default_factory=dict)  # bytes of these matrices by format
    inflated: set[str] = field(default_factory=set)  # formats that a GPU cannot multiply by

    def bytes_on(self, *, gpu: bool) -> int:
        return self.gpu_bytes if gpu else self.ram_bytes


@dataclass(frozen=True)
class ModelParts:
    """`dense`: every module but routed experts, in file order; `experts`: by layer."""

    layers: int
    hidden: int
    dense: tuple[Part, ...]
    experts: dict[int, Part]
    kv_layer_bytes: tuple[int, ...]  # of one token
    # Multiplications of one row with one token of the cache, over all layers: of decoding, of long prompts.
    attention_widths: tuple[int, int]

    @property
    def all(self) -> tuple[Part, ...]:
        return (*self.dense, *self.experts.values())

    @property
    def kv_token_bytes(self) -> int:
        return sum(self.kv_layer_bytes)

    @property
    def expert_bytes(self) -> int:
        return sum(part.ram_bytes for part in self.experts.values())


def model_parts(source: WeightSource, options: RunOptions) -> ModelParts:
    """Raises MalformedFileError for metadata that cannot be planned with."""
    metadata = source.metadata
    layers = decoder_layers(metadata)
    parts: dict[str, Part] = {}
    for tensor in source.tensors.values():
        path = module_path(tensor.name)
        part = parts.setdefault(path, Part(path, _layer(path, layers)))
        _add(part, tensor, source, exact=options.exact_batching)
    used = metadata.int(key(metadata, "expert_used_count"), 0, min=0)
    experts = {}
    for part in parts.values():
        if part.layer is not None and part.path.endswith(f".{EXPERTS}"):
            if part.count and used > part.count:
                raise metadata.bad(key(metadata, "expert_used_count"), f"at most the {part.count} experts")
            part.used = used
            experts[part.layer] = part
    return ModelParts(
        layers=layers,
        hidden=metadata.int(key(metadata, "embedding_length"), min=1),
        dense=tuple(part for part in parts.values() if not part.path.endswith(f".{EXPERTS}")),
        experts=experts,
        kv_layer_bytes=tuple(kv_layer_bytes(metadata, options.kv_dtype)),
        attention_widths=attention_widths(metadata),
    )


def module_path(tensor_name: str) -> str:
    """`blk.3.attn_q.weight` -> `blk.3.attn`; `output.weight` -> `output`."""
    words = tensor_name.split(".")
    if words[0] != "blk" or len(words) < 3:
        return words[0]
    return f"blk.{words[1]}.{_module(words[2])}"


def _module(word: str) -> str:
    for suffix, module in (("_exps", EXPERTS), ("_shexp", "ffn_shexp")):
        if word.endswith(suffix):
            return module
    for prefix, module in _MODULES.items():
        if word.startswith(prefix):
            return module
    return "ffn" if word in _DENSE else word


def _layer(path: str, layers: int) -> int | None:
    words = path.split(".")
    if words[0] != "blk" or len(words) < 2 or not words[1].isdigit():
        return None
    return min(int(words[1]), layers - 1)  # a layer beyond the last is refused when the model is built


def _add(part: Part, tensor: RawTensor, source: WeightSource, *, exact: bool) -> None:
    part.ram_bytes += ram_bytes(tensor, source, exact)
    part.gpu_bytes += gpu_bytes(tensor, source)
    part.ram_read += ram_read(tensor, source)
    part.gpu_read += gpu_read(tensor, source)
    if part.path.endswith(f".{EXPERTS}"):
        part.count = max(part.count, tensor.shape[0] if len(tensor.shape) == 3 else 0)
    if is_vector(tensor) or (tensor.name == "token_embd.weight" and "output.weight" in source.tensors):
        return
    part.weights += prod(tensor.shape)
    part.formats[tensor.format.name] = part.formats.get(tensor.format.name, 0) + tensor.nbytes
    if not stays_packed(tensor):
        part.inflated.add(tensor.format.name)


def by_layer(parts: tuple[Part, ...]) -> dict[int | None, list[Part]]:
    grouped: dict[int | None, list[Part]] = defaultdict(list)
    for part in parts:
        grouped[part.layer].append(part)
    return grouped
