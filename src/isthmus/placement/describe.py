"""A model in numbers, from its header: parameters and bytes by component, what a token reads. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from isthmus.placement.parts import ModelParts
from isthmus.placement.sizes import key
from isthmus.weights.source import RawTensor, WeightSource

# Component -> how the tensors' last word but one begins or ends, the first that fits.
EMBEDDING, HEAD, ROUTED, SHARED = "embedding", "head", "routed experts", "shared experts"
ROUTER, ATTENTION, DENSE, OTHER = "router", "attention", "dense feed-forward", "norms and others"
COMPONENTS = (ROUTED, SHARED, DENSE, ATTENTION, ROUTER, EMBEDDING, HEAD, OTHER)


@dataclass
class Component:
    parameters: int = 0
    nbytes: int = 0
    formats: dict[str, int] = field(default_factory=dict)  # bytes by format


@dataclass(frozen=True)
class ModelNumbers:
    """`active_parameters`: multiplied by for one token; of an embedding none. `nbytes`: in the file."""

    name: str
    architecture: str
    layers: int
    expert_layers: int
    experts: int
    experts_used: int
    parameters: int
    active_parameters: int
    nbytes: int
    active_bytes: int  # read for one token
    routed_bytes: int  # of these, routed experts'
    kv_token_bytes: int
    context_tokens: int  # the model was trained for
    window_tokens: int  # that some layers see at most, 0 for none; `kv_token_bytes` counts them like others
    components: dict[str, Component]


def model_numbers(name: str, source: WeightSource, parts: ModelParts) -> ModelNumbers:
    metadata = source.metadata
    experts = metadata.int(key(metadata, "expert_count"), 0, min=0)
    used = metadata.int(key(metadata, "expert_used_count"), 0, min=0)
    components: dict[str, Component] = {part: Component() for part in COMPONENTS}
    for tensor in source.tensors.values():
        component = components[component_of(tensor)]
        component.parameters += prod(tensor.shape)
        component.nbytes += tensor.nbytes
        name_of = tensor.format.name
        component.formats[name_of] = component.formats.get(name_of, 0) + tensor.nbytes
    total = sum(component.parameters for component in components.values())
    idle = components[ROUTED].parameters * (1 - used / experts) if experts else 0.0
    looked_up = components[EMBEDDING].parameters if "output.weight" in source.tensors else 0
    return ModelNumbers(
        name=name,
        architecture=metadata.str("general.architecture"),
        layers=parts.layers,
        expert_layers=len(parts.experts),
        experts=experts,
        experts_used=used,
        parameters=total,
        active_parameters=round(total - idle - looked_up),
        nbytes=sum(component.nbytes for component in components.values()),
        active_bytes=round(sum(part.ram_read for part in parts.all)),
        routed_bytes=round(sum(part.ram_read for part in parts.experts.values())),
        kv_token_bytes=parts.kv_token_bytes,
        context_tokens=metadata.int(key(metadata, "context_length"), 0, min=0),
        window_tokens=metadata.int(key(metadata, "attention.sliding_window"), 0, min=0),
        components={what: found for what, found in components.items() if found.parameters},
    )


def component_of(tensor: RawTensor) -> str:
    """Of llama.cpp's names."""
    words = tensor.name.split(".")
    word = words[2] if words[0] == "blk" and len(words) > 2 else words[0]
    if word in ("token_embd", "output"):
        return EMBEDDING if word == "token_embd" else HEAD
    if "_norm" in word or word == "norm":
        return OTHER
    for component, is_it in (
        (ROUTED, word.endswith("_exps")),
        (SHARED, word.endswith("_shexp")),
        (ROUTER, word.startswith(("ffn_gate_inp", "exp_probs_b"))),
        (DENSE, word in ("ffn_gate", "ffn_up", "ffn_down")),
        (ATTENTION, word.startswith("attn_")),
    ):
        if is_it:
            return component
    return OTHER
