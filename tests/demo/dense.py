"""The demo model before its upcycling: rounded to any 32-column format, its float products by transformers.

What the products of a path cost is told by two measures over the same text. The perplexity's excess is what
counts, but its paired differences have a standard deviation of about 0.13 a token: half a percent drowns in
the noise of 1500 tokens. The KL divergence to the float distribution is the excess to be expected of noise
that knows nothing of the text, and its standard error is 0.02 % after 500 tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as hf
from torch import Tensor

from isthmus import native
from isthmus.formats.codebook_reference import FP4, NONLINEAR
from isthmus.formats.kv_cache import KvDtype
from isthmus.formats.spec import FormatSpec, by_name
from isthmus.models.base import Model
from isthmus.resolve import resolve_model
from isthmus.tokenizer import Tokenizer
from isthmus.weights.demo import carried_file
from isthmus.weights.gguf import GgufSource
from isthmus.weights.gguf_writer import TensorPlan, write_gguf
from isthmus.weights.source import open_weights
from models.steps import Session, load

CHUNK = 512
WARM_UP = 32  # a text's first tokens: activations with outliers, and next to no context
LICENSE = Path(__file__).parents[2] / "LICENSE"  # English prose that every checkout has


def tokens_of(text: str, count: int) -> list[int]:
    with contextlib.closing(open_weights(resolve_model("demo"))) as source:
        tokenizer = Tokenizer.from_gguf(source.metadata)
    return tokenizer.encode(text, add_special=True, parse_special=False)[:count]


# --- the weights, in blocks and as floats ---


@dataclass(frozen=True)
class Weight:
    format: FormatSpec
    shape: tuple[int, ...]
    data: np.ndarray  # uint8, the file's bytes

    @property
    def values(self) -> np.ndarray:
        """fp32 in `shape`, as gguf-py reads the bytes."""
        values = gguf.quants.dequantize(self.data, gguf.GGMLQuantizationType(self.format.ggml_id))
        return values.reshape(self.shape)


Weights = dict[str, Weight]


@cache
def carried() -> Weights:
    """The file inside the package: matrices in Q4_1, the embedding, which is also the head, in Q8_0."""
    with contextlib.closing(GgufSource(carried_file())) as source:
        return {
            raw.name: Weight(raw.format, raw.shape, np.frombuffer(raw.data.tobytes(), np.uint8))
            for raw in source.tensors.values()
        }


def rounded(name: str) -> Weights:
    """The same model with its Q4_1 matrices rounded to another format of 32 columns."""
    spec = by_name(name)

    def convert(weight: Weight) -> Weight:
        if weight.format.name != "q4_1" or name == "q4_1":
            return weight
        return Weight(spec, weight.shape, QUANTIZE[name](weight.values).reshape(-1))

    return {key: convert(weight) for key, weight in carried().items()}


def by_gguf_py(name: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: gguf.quants.quantize(values, gguf.GGMLQuantizationType[name.upper()])


def _nearest(values: Tensor, table: np.ndarray) -> np.ndarray:
    """Indices into `table`, uint8, of the entries nearest to `values`."""
    entries, order = torch.from_numpy(table).sort()
    index = torch.bucketize(values, (entries[1:] + entries[:-1]) / 2)
    return order[index].to(torch.uint8).numpy()


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """[n, 32] codes -> [n, 16]: columns 0..15 are the low halves."""
    return codes[:, :16] | codes[:, 16:] << 4


def _iq4_nl(values: np.ndarray) -> np.ndarray:
    """As files are made: of 15 scales that put the largest value near -127, the one whose codes fit best, by
    squared errors weighted with x^2, and then the scale that fits these codes best."""
    x = torch.from_numpy(values).reshape(-1, 32)
    top = x.gather(1, x.abs().argmax(1, keepdim=True))
    best, d = torch.full_like(top, -1), torch.zeros_like(top)
    for end in range(-134, -119):
        inverse = end / top.where(top != 0, torch.ones(()))
        q = torch.from_numpy(NONLINEAR)[_nearest(x * inverse, NONLINEAR).astype(np.int64)]
        product, square = (x**3 * q).sum(1, keepdim=True), (x**2 * q**2).sum(1, keepdim=True)
        fit = product**2 / square.clamp_min(1e-30)
        d = torch.where(fit > best, product / square.clamp_min(1e-30), d)
        best = torch.maximum(fit, best)
    d = d.half()
    codes = _nearest(x / d.float().where(d != 0, torch.ones(())), NONLINEAR)
    return np.concatenate([d.numpy().view(np.uint8), _nibbles(codes)], 1)


def _mxfp4(values: np.ndarray) -> np.ndarray:
    x = torch.from_numpy(values).reshape(-1, 32)
    top = x.abs().amax(1, keepdim=True).clamp_min(2.0**-100)
    exponent = torch.floor(torch.log2(top)) - 2  # the largest value, 6, is 1.5 * 2^2
    codes = _nearest(x * torch.exp2(1 - exponent), FP4)
    return np.concatenate([(exponent + 127).to(torch.uint8).numpy(), _nibbles(codes)], 1)


QUANTIZE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    name: by_gguf_py(name) for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
}
QUANTIZE |= {"iq4_nl": _iq4_nl, "mxfp4": _mxfp4}


def write_dense(path: Path, weights: Weights) -> Path:
    """The dense model as a GGUF file."""
    with contextlib.closing(GgufSource(carried_file())) as source:
        metadata = {k: (source.value_types[k], source.metadata[k]) for k in source.metadata}
    plans = [
        TensorPlan(name, w.shape, w.format, lambda w=w: [w.data.tobytes()]) for name, w in weights.items()
    ]
    with path.open("wb") as file:
        write_gguf(file, metadata, plans)
    return path


# --- distributions over the next token ---


def float_model(weights: Weights) -> hf.LlamaForCausalLM:
    """transformers' model over the values of `weights`, all products in fp32."""
    with contextlib.closing(GgufSource(carried_file())) as source:
        metadata = dict(source.metadata)

    def key(name: str) -> Any:
        return metadata[f"llama.{name}"]

    heads, kv_heads = key("attention.head_count"), key("attention.head_count_kv")
    config = hf.LlamaConfig(
        vocab_size=key("vocab_size"),
        hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"),
        num_hidden_layers=key("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=key("context_length"),
        rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": key("rope.freq_base")},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    state = {}
    for name in model.state_dict().keys() - {"lm_head.weight"}:
        values = torch.from_numpy(np.array(weights[names.get_name(name, (".weight",))].values))
        if "q_proj" in name or "k_proj" in name:  # llama.cpp turns neighbours, transformers halves of a head
            count = heads if "q_proj" in name else kv_heads
            values = values.view(count, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        state[name] = values
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    # A buffer that is no weight: made again outside the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


class RoundedCache(hf.DynamicCache):
    """Keys and values as a cache of this type holds them (q8_0: by gguf-py) in transformers' own model."""

    def __init__(self, kv_dtype: KvDtype) -> None:
        super().__init__()
        self._kv_dtype = kv_dtype

    def update(self, keys: Tensor, values: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        return super().update(self._rounded(keys), self._rounded(values), *rest, **named)

    def _rounded(self, x: Tensor) -> Tensor:
        if self._kv_dtype == "q8_0":
            blocks = gguf.quants.quantize(x.contiguous().numpy(), gguf.GGMLQuantizationType.Q8_0)
            return torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
        return x.bfloat16().float() if self._kv_dtype == "bf16" else x


def float_log_probs(model: hf.LlamaForCausalLM, tokens: Sequence[int], kv_dtype: KvDtype = "f32") -> Tensor:
    """[T, vocab]"""
    rounded = {} if kv_dtype == "f32" else {"cache": RoundedCache(kv_dtype)}
    with torch.inference_mode():
        return model(torch.tensor([tokens]), **rounded).logits[0].log_softmax(-1)


@dataclass(frozen=True)
class Products:
    """A driver on an instruction set."""

    driver: str  # "gemv" for every row, or "gemm" where rows suffice
    isa: str
    kv_dtype: KvDtype = "f32"

    def load(self, path: Path) -> Model:
        return load(path, exact_batching=self.driver == "gemv", kv_dtype=self.kv_dtype)

    def log_probs(self, model: Model, tokens: Sequence[int]) -> Tensor:
        """[T, vocab] of a model that `load` gave."""
        before = native.current_isa()
        native.use_isa(self.isa)
        try:
            session = Session(model, 1, len(tokens))
            chunks = [session.step([(0, tokens[i : i + CHUNK])])[0] for i in range(0, len(tokens), CHUNK)]
        finally:
            native.use_isa(before)
        return torch.cat(chunks).log_softmax(-1)

    def __str__(self) -> str:
        return f"{self.driver} {self.isa}, cache {self.kv_dtype}"


def all_products() -> list[Products]:
    """Those that differ in their bits: vectors, GEMV or GEMM alike, and the GEMM of a matrix unit."""
    vectors = [isa for isa in native.isa_names() if isa != "amx"][-1]
    units = [isa for isa in native.isa_names() if isa == "amx"]
    return [Products("gemm", isa) for isa in (vectors, *units)]


@dataclass(frozen=True)
class Distance:
    """Per token from WARM_UP on: the loss's excess over the float loss, and the KL divergence; float64."""

    perplexity: float  # of the float products
    excess: Tensor
    kl: Tensor

    @staticmethod
    def between(wanted: Tensor, got: Tensor, tokens: Sequence[int]) -> Distance:
        wanted, got = wanted[WARM_UP:-1], got[WARM_UP:-1]
        following = torch.tensor(tokens[WARM_UP + 1 :])[:, None]
        losses = [-log_probs.gather(1, following)[:, 0].double() for log_probs in (wanted, got)]
        kl = (wanted.exp() * (wanted - got)).sum(-1).double()
        return Distance(float(losses[0].mean().exp()), losses[1] - losses[0], kl)

    @staticmethod
    def joined(parts: Sequence[Distance]) -> Distance:
        """Of pieces of one text, all equally long."""
        perplexity = float(np.exp(np.mean([np.log(part.perplexity) for part in parts])))
        return Distance(perplexity, torch.cat([p.excess for p in parts]), torch.cat([p.kl for p in parts]))

    def __str__(self) -> str:
        excess, kl = (f"{float(v.mean()):+.2%} +- {standard_error(v):.2%}" for v in (self.excess, self.kl))
        return f"perplexity {self.perplexity:.2f} in float, {excess} here; KL {kl}"


def standard_error(values: Tensor) -> float:
    return float(values.std()) / len(values) ** 0.5
