"""A model's header in the making: its keys and tensors as a GGUF file would list them, without any data.

Knows the conventions that hold for every family: the names of tensors and a synthetic vocabulary. Formats are
those of `quants.py`. Which tensors a model has is its family's text, in `shape_*.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isthmus.formats.spec import FormatSpec
from isthmus.weights.gguf_header import ValueType as V
from isthmus.weights.quants import tensor_format

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
        self.add("token_embd.weight", (vocab, hidden), std=1.0)
        self.add("output_norm.weight", (hidden,), std=ONES)
        self.add("output.weight", (vocab, hidden))

    def norms(self, layer: int, **sizes: int) -> None:
        for name, size in sizes.items():
            self.add(f"blk.{layer}.{name}.weight", (size,), std=ONES)

    def biases(self, layer: int, *experts: int, **sizes: int) -> None:
        """Of one matrix, or of as many as `experts` says."""
        for name, size in sizes.items():
            self.add(f"blk.{layer}.{name}.bias", (*experts, size), std=1e-3)

    def matrix(self, layer: int, kind: str, *shape: int) -> None:
        """blk.LAYER.KIND.weight"""
        self.add(f"blk.{layer}.{kind}.weight", shape)

    def feed_forward(self, layer: int, suffix: str, inner: int, hidden: int) -> None:
        self.matrix(layer, f"ffn_gate{suffix}", inner, hidden)
        self.matrix(layer, f"ffn_up{suffix}", inner, hidden)
        self.matrix(layer, f"ffn_down{suffix}", hidden, inner)

    def routed(self, layer: int, experts: int, inner: int, hidden: int) -> None:
        """The router, always fp32, and its experts."""
        self.matrix(layer, "ffn_gate_inp", experts, hidden)
        self.matrix(layer, "ffn_gate_exps", experts, inner, hidden)
        self.matrix(layer, "ffn_up_exps", experts, inner, hidden)
        self.matrix(layer, "ffn_down_exps", experts, hidden, inner)

    def add(self, name: str, shape: tuple[int, ...], *, std: float | None = None) -> None:
        spec = tensor_format(name, shape, self._quant, layers=self._layers, experts=self._experts)
        self.tensors.append(TensorDraft(name, shape, spec, shape[-1] ** -0.5 if std is None else std))


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
