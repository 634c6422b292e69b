"""A model's header in the making: its keys and tensors as a GGUF file would list them, without any data.

Knows the conventions that hold for every family: the names of tensors, llama.cpp's choice of a format for
each of them, a synthetic vocabulary. Which tensors a model has is its family's text, in `shapes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isthmus.formats.spec import FORMATS, FormatSpec, by_name
from isthmus.weights.gguf_header import ValueType as V

MIX = "q4_k_m"
# Every format weights come in, and the mix of two that most published files are.
QUANTS = (MIX, *(spec.name for spec in FORMATS.values() if spec.runnable))

# In these nobody quantises embedding, head or the halves of kv_b further.
WIDE = ("f32", "f16", "bf16", "q8_0")
# What llama.cpp's quantiser takes for rows that a 256-column format cannot hold; any other becomes q8_0.
FALLBACK = {"q4_k": "q5_0", "q5_k": "q5_0", "q6_k": "q8_0"}

ONES = 0.0  # in place of a std: every value is 1

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class TensorDraft:
    """std: of the random values, fan_in^-0.5 unless the family says otherwise; ONES: a norm."""

    name: str
    shape: tuple[int, ...]
    format: FormatSpec
    std: float


class Draft:
    """`experts`: of a layer. Layers beyond a model's own number are as valid as fewer."""

    def __init__(self, arch: str, layers: int, quant: str, *, experts: int) -> None:
        self.metadata: dict[str, tuple[V, Any]] = {"general.architecture": (V.STRING, arch)}
        self.tensors: list[TensorDraft] = []
        self._arch = arch
        self._layers = layers
        self._quant = quant
        self._experts = experts
        self.keys(V.UINT32, block_count=layers)

    def keys(self, kind: V, **values: Any) -> None:
        """Keys below the architecture's name; a double underscore stands for a dot."""
        for name, value in values.items():
            self.metadata[f"{self._arch}.{name.replace('__', '.')}"] = (kind, value)

    def head(self, hidden: int, heads: int, kv_heads: int, vocab: int, context: int, eps: float) -> None:
        """What every decoder has around its layers, and the tokenizer."""
        self.keys(V.UINT32, context_length=context, embedding_length=hidden, vocab_size=vocab)
        self.keys(V.UINT32, attention__head_count=heads, attention__head_count_kv=kv_heads)
        self.keys(V.FLOAT32, attention__layer_norm_rms_epsilon=eps)
        self.metadata |= _tokenizer(vocab)
        embedding, head = (self._quant, self._quant) if self._quant in WIDE else ("q4_k", "q6_k")
        self.add("token_embd.weight", (vocab, hidden), embedding, std=1.0)
        self.add("output_norm.weight", (hidden,), "f32", std=ONES)
        self.add("output.weight", (vocab, hidden), head)

    def norms(self, layer: int, **sizes: int) -> None:
        for name, size in sizes.items():
            self.add(f"blk.{layer}.{name}.weight", (size,), "f32", std=ONES)

    def matrix(self, layer: int, kind: str, *shape: int, at_least: str = "") -> None:
        """blk.LAYER.KIND.weight; at_least: the format of a quantised model whatever its quantisation."""
        quant = at_least if at_least and self._quant not in WIDE else self._format(kind, layer)
        self.add(f"blk.{layer}.{kind}.weight", shape, quant)

    def feed_forward(self, layer: int, suffix: str, inner: int, hidden: int) -> None:
        self.matrix(layer, f"ffn_gate{suffix}", inner, hidden)
        self.matrix(layer, f"ffn_up{suffix}", inner, hidden)
        self.matrix(layer, f"ffn_down{suffix}", hidden, inner)

    def routed(self, layer: int, experts: int, inner: int, hidden: int) -> None:
        """The router, always fp32, and its experts."""
        self.add(f"blk.{layer}.ffn_gate_inp.weight", (experts, hidden), "f32")
        self.matrix(layer, "ffn_gate_exps", experts, inner, hidden)
        self.matrix(layer, "ffn_up_exps", experts, inner, hidden)
        self.matrix(layer, "ffn_down_exps", experts, hidden, inner)

    def add(self, name: str, shape: tuple[int, ...], quant: str, *, std: float | None = None) -> None:
        spec = by_name(quant)
        if shape[-1] % spec.block_columns:
            spec = by_name(FALLBACK.get(spec.name, "q8_0"))
        self.tensors.append(TensorDraft(name, shape, spec, shape[-1] ** -0.5 if std is None else std))

    def _format(self, kind: str, layer: int) -> str:
        """Q4_K_M as llama.cpp's quantiser mixes it (src/llama-quant.cpp); any other name is one format."""
        if self._quant != MIX:
            return self._quant
        if self._experts == 8:  # Mixtral: attention is so small a part that it gets more bits
            if kind in ("attn_v", "attn_k"):
                return "q8_0"
            if kind == "attn_output":
                return "q5_k"
        more = kind == "attn_v" or kind.startswith("ffn_down")
        return "q6_k" if more and _more_bits(layer, self._layers) else "q4_k"


def _more_bits(layer: int, layers: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _tokenizer(vocab: int) -> dict[str, tuple[V, Any]]:
    """SentencePiece: byte tokens, then numbered words, so that any text has tokens and any token a text."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    tokens += [f"\u2581w{i}" for i in range(vocab - len(tokens))]
    return {
        "tokenizer.ggml.model": (V.STRING, "llama"),
        "tokenizer.ggml.pre": (V.STRING, "default"),
        "tokenizer.ggml.tokens": (V.STRING, tokens),
        "tokenizer.ggml.scores": (V.FLOAT32, [0.0] * vocab),
        "tokenizer.ggml.token_type": (V.INT32, [2, 3, 3] + [6] * 256 + [1] * (vocab - 259)),
        "tokenizer.ggml.bos_token_id": (V.UINT32, 1),
        "tokenizer.ggml.eos_token_id": (V.UINT32, 2),
        "tokenizer.ggml.unknown_token_id": (V.UINT32, 0),
        "tokenizer.ggml.add_bos_token": (V.BOOL, True),
        "tokenizer.chat_template": (V.STRING, CHAT_TEMPLATE),
    }
