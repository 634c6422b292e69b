"""Gives a model its modules: tensors asked for by name and shape, all found before one is packed.

A model file is the only text that knows which tensors exist. While the model is constructed nothing is
read: shapes and formats are held against the config, and every mistake is collected. `finish` reports them
together - missing, misshapen, in a format without a kernel, or left over - and only then loads, module by
module.

Here alone it is decided whether a module is native or a device's: by where `Targets` has its first tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, Protocol, TypeVar

import torch

from isthmus.config import BLOCK_TOKENS, DEFAULT_CONTEXT_TOKENS, RunOptions
from isthmus.errors import MalformedFileError, UnsupportedError, UsageError
from isthmus.formats.spec import by_name
from isthmus.modules import on_gpu
from isthmus.modules.attention import AttentionConfig, GroupedQueryAttention
from isthmus.modules.embedding import Embedding
from isthmus.modules.experts import SILU, Act, Experts, Gated, Matrices
from isthmus.modules.linear import Linear
from isthmus.modules.loader import PLAIN, Loader, PackedStore
from isthmus.modules.mla import LatentAttention, LatentConfig
from isthmus.modules.norm import RmsNorm
from isthmus.modules.on_gpu.target import Target, Targets
from isthmus.modules.rope import Rope, RopeConfig
from isthmus.modules.router import Router, RouterConfig, SigmoidGate
from isthmus.modules.split import ExpertSplit, SplitExperts
from isthmus.weights.source import RawTensor, WeightSource


class Module(Protocol):
    def load(self, loader: Loader) -> None:
        """Packs the module's raw tensors and lets go of them: they keep the file mapped."""


M = TypeVar("M", bound=Module)


class Builder:
    def __init__(
        self,
        source: WeightSource,
        options: RunOptions,
        progress: Callable[[int], None] | None = None,
        store: PackedStore | None = None,
        split: ExpertSplit | None = None,
        targets: Targets | None = None,
    ) -> None:
        """split: how the native CPU hands routed experts to itself; None: it is the device of everything.

        targets: which modules are on devices instead, with hand-offs of their own. Raises UsageError for
        options that hold on the CPU alone.
        """
        self.options = options
        self.split = split
        self._targets = targets
        if targets:
            _check_options(options)
        self._source = source
        self._progress = progress
        self._store = store
        self._prefix = ""
        self._modules: list[Module] = []
        self._used: set[str] = set()
        self._ignored: list[str] = []
        self._missing: list[str] = []
        self._misshapen: list[str] = []
        self._unsupported: list[str] = []

    def scope(self, prefix: str) -> Builder:
        """The same builder, with `prefix` before every name: `build.scope("blk.3.")`."""
        inner = object.__new__(Builder)
        inner.__dict__.update(self.__dict__)
        inner._prefix = self._prefix + prefix
        return inner

    def add(self, module: M) -> M:
        """A module that took its tensors with `matrix` and `vector`; it is loaded in `finish`."""
        self._modules.append(module)
        return module

    def ignore(self, name: str) -> None:
        """A tensor that repeats what others hold: not read, and not a leftover."""
        if self.has(name):
            raw = self._source.tensors[self._prefix + name]
            self._used.update((raw.name, *(companion.name for companion in raw.aux.values())))
            self._ignored.append(raw.name)

    def has(self, name: str) -> bool:
        return self._prefix + name in self._source.tensors

    def target(self, name: str) -> Target | None:
        """The device of the module that the tensor belongs to; None: the CPU, natively."""
        found = self._targets.by_tensor(self._prefix + name) if self._targets and self.has(name) else None
        if found and found.exact != self.options.exact_batching:
            raise ValueError(
                f"exact_batching is {self.options.exact_batching}, and its target's exact {found.exact}"
            )
        return found

    def matrix(self, name: str, *shape: int, also: tuple[int, ...] = ()) -> RawTensor:
        """A tensor for packing, [rows, columns] or [experts, rows, columns]; `also`: the same in two dims."""
        raw = self._take(name, shape, also)
        if not raw.format.runnable:
            self._unsupported.append(f"{raw.name} ({raw.format.reason})")
        return raw

    def vector(self, name: str, *shape: int) -> RawTensor:
        """A norm, bias or table: [size], or [experts, size], in F32, F16 or BF16."""
        raw = self._take(name, shape, ())
        if raw.format.name not in PLAIN:
            self._unsupported.append(f"{raw.name} ({raw.format.name}; needed: {', '.join(PLAIN)})")
        return raw

    def embedding(self, name: str, vocab: int, hidden: int) -> Embedding:
        raw, target = self.matrix(name, vocab, hidden), self.target(name)
        return self.add(on_gpu.Embedding(raw, target) if target else Embedding(raw))

    def norm(self, name: str, size: int, eps: float) -> RmsNorm:
        raw, target = self.vector(name, size), self.target(name)
        return self.add(on_gpu.RmsNorm(raw, eps, target) if target else RmsNorm(raw, eps))

    def linear(
        self, rows: Mapping[str, int], columns: int, *, bias: Literal["none", "required", "optional"] = "none"
    ) -> Linear:
        """Matrices NAME.weight [rows, columns] side by side, with NAME.bias (optional: if it is there)."""
        return self._linear(rows, columns, bias, torch.bfloat16)

    def head(self, name: str, vocab: int, hidden: int) -> Linear:
        """NAME.weight [vocab, hidden]: logits are fp32 wherever they are made."""
        return self._linear({name: vocab}, hidden, "none", torch.float32)

    def attention(self, config: AttentionConfig, rope: Rope) -> GroupedQueryAttention:
        target = self.target("attn_output.weight")
        if target:
            return on_gpu.GroupedQueryAttention(self, config, rope, target)
        return GroupedQueryAttention(self, config, rope)

    def latent_attention(self, config: LatentConfig, rope: Rope) -> LatentAttention:
        target = self.target("attn_output.weight")
        if target:
            return on_gpu.LatentAttention(self, config, rope, target)
        return LatentAttention(self, config, rope)

    def _linear(self, rows: Mapping[str, int], columns: int, bias: str, dtype: torch.dtype) -> Linear:
        """dtype: of results on a device; the native CPU's are fp32."""
        weights = [self.matrix(f"{name}.weight", n, columns) for name, n in rows.items()]
        biased = [bias == "required" or (bias == "optional" and self.has(f"{name}.bias")) for name in rows]
        biases = [
            self.vector(f"{name}.bias", n) if wanted else None
            for (name, n), wanted in zip(rows.items(), biased, strict=True)
        ]
        target = self.target(f"{next(iter(rows))}.weight")
        if target:
            return self.add(on_gpu.Linear(weights, biases, target, dtype))
        return self.add(Linear(weights, biases, exact=self.options.exact_batching))

    def rope(self, config: RopeConfig, context_tokens: int, *, factors: str = "") -> Rope:
        """Tables for the context of this run: as asked for, else the model's own up to the default."""
        wanted = self.options.context_tokens or min(context_tokens, DEFAULT_CONTEXT_TOKENS)
        positions = -(-wanted // BLOCK_TOKENS) * BLOCK_TOKENS
        raw = self.vector(factors, config.dim // 2) if factors and self.has(factors) else None
        return self.add(Rope(config, raw, positions))

    def router(
        self, config: RouterConfig, hidden: int, *, bias: bool = False, gate_bias: bool = False
    ) -> Router:
        """ffn_gate_inp, with `gate_bias` its bias too; with `bias` also exp_probs_b, which chooses but does
        not weigh."""
        gate = self.matrix("ffn_gate_inp.weight", config.experts, hidden)
        added = self.vector("ffn_gate_inp.bias", config.experts) if gate_bias else None
        chooser = self.vector("exp_probs_b.bias", config.experts) if bias else None
        target = self.target("ffn_gate_inp.weight")
        if target:
            return self.add(on_gpu.Router(config, gate, chooser, target, gate_bias=added))
        exact = self.options.exact_batching
        return self.add(Router(config, gate, chooser, gate_bias=added, exact=exact))

    def sigmoid_gate(self, name: str, hidden: int) -> SigmoidGate:
        raw, target = self.matrix(name, 1, hidden), self.target(name)
        if target:
            return self.add(on_gpu.SigmoidGate(raw, target))
        return self.add(SigmoidGate(raw, exact=self.options.exact_batching))

    def experts(
        self,
        hidden: int,
        experts: int,
        inner: int,
        *,
        top_k: int,
        shared_inner: int = 0,
        act: Act = SILU,
        bias: bool = False,
    ) -> Experts | SplitExperts | on_gpu.SplitExperts:
        """Routed ffn_*_exps [experts, inner, hidden]; with `shared_inner` also the shared ffn_*_shexp.

        bias: each routed matrix has NAME.bias [experts, its rows]. They are called where the router is,
        whatever computes them.
        """
        routed = self.expert_matrices(hidden, experts, inner, act=act, bias=bias)
        shared = self.shared_matrices(hidden, shared_inner, act=act) if shared_inner else None
        layer = int(self._prefix.split(".")[1])  # blk.N.
        target = self.target("ffn_gate_inp.weight")
        if target and self._targets:
            slots = self._targets.slots.get(layer)
            return self.add(on_gpu.routed_experts(target, layer, top_k, routed, shared, slots))
        if self.split:
            return self.add(SplitExperts(self.split, layer, top_k, routed, shared))
        return self.add(Experts(routed, shared, exact=self.options.exact_batching))

    def expert_matrices(
        self, hidden: int, experts: int, inner: int, *, act: Act, bias: bool = False
    ) -> Matrices:
        def matrix(name: str, rows: int, columns: int) -> RawTensor:
            raw = self.matrix(f"{name}.weight", experts, rows, columns)
            return self._biased(raw, f"{name}.bias", experts, rows) if bias else raw

        return Gated(
            matrix("ffn_gate_exps", inner, hidden),
            matrix("ffn_up_exps", inner, hidden),
            matrix("ffn_down_exps", hidden, inner),
            act,
        )

    def shared_matrices(self, hidden: int, inner: int, *, act: Act) -> Matrices:
        return self._feed_forward("_shexp", hidden, inner, act)

    def feed_forward(self, hidden: int, inner: int) -> Experts:
        """A dense FFN is one expert that every row takes."""
        matrices, target = self._feed_forward("", hidden, inner, SILU), self.target("ffn_down.weight")
        if target:
            return self.add(on_gpu.FeedForward(matrices, target))
        return self.add(Experts(matrices, None, exact=self.options.exact_batching))

    def finish(self) -> None:
        """Reports every mistake, or loads every module."""
        leftover = [name for name in self._source.tensors if name not in self._used]
        for error, what, names in (
            (MalformedFileError, "is missing tensors its architecture needs", self._missing),
            (MalformedFileError, "has tensors whose shape is not what its metadata says", self._misshapen),
            (UnsupportedError, "has tensors in a format the CPU kernels lack", self._unsupported),
            (
                UnsupportedError,
                "has tensors its architecture does not use: its text would be wrong",
                leftover,
            ),
        ):
            if names:
                shown = "; ".join(names[:8]) + (f"; and {len(names) - 8} more" if len(names) > 8 else "")
                raise error(f"{self._source.path} {what}: {shown}")
        loader = Loader(self._source, self._progress, self._store)
        for name in self._ignored:
            loader.skip(self._source.tensors[name])
        for module in self._modules:
            module.load(loader)

    def _feed_forward(self, suffix: str, hidden: int, inner: int, act: Act) -> Matrices:
        return Gated(
            self.matrix(f"ffn_gate{suffix}.weight", inner, hidden),
            self.matrix(f"ffn_up{suffix}.weight", inner, hidden),
            self.matrix(f"ffn_down{suffix}.weight", hidden, inner),
            act,
        )

    def _biased(self, raw: RawTensor, name: str, experts: int, rows: int) -> RawTensor:
        """The bias goes with its matrix, as a scale of its own does."""
        return replace(raw, aux={**raw.aux, "bias": self.vector(name, experts, rows)})

    def _take(self, name: str, shape: tuple[int, ...], also: tuple[int, ...]) -> RawTensor:
        """The tensor, in `shape`; a placeholder where there is none: `finish` will refuse the file."""
        full = self._prefix + name
        raw = self._source.tensors.get(full)
        self._used.add(full)
        if raw is None:
            self._missing.append(f"{full} {list(shape)}")
            return RawTensor(full, shape, by_name("f32"), memoryview(b""), self._source.path)
        if _squeezed(raw.shape) not in (_squeezed(shape), _squeezed(also or shape)):
            self._misshapen.append(f"{full} is {list(raw.shape)}, needed {list(shape)}")
        for role, companion in raw.aux.items():
            self._used.add(companion.name)
            if role == "scale":
                self._check_scale(companion, shape)
        return raw if raw.shape == shape else replace(raw, shape=shape)

    def _check_scale(self, scale: RawTensor, shape: tuple[int, ...]) -> None:
        """A tensor's own scale: one value, or one per expert."""
        allowed = {1, shape[0]} if len(shape) == 3 else {1}
        if math.prod(scale.shape) not in allowed:
            needed = " or ".join(f"[{n}]" for n in sorted(allowed))
            self._misshapen.append(f"{scale.name} is {list(scale.shape)}, needed {needed}")
        if scale.format.name not in PLAIN:
            self._unsupported.append(f"{scale.name} ({scale.format.name}; needed: {', '.join(PLAIN)})")


def _check_options(options: RunOptions) -> None:
    """What a device's kernels do not keep is refused, not ignored."""
    if options.kv_dtype == "f32":
        raise UsageError(
            "kv_dtype f32 is for the CPU: a GPU's attention reads a cache of bf16 or q8_0; leave it out, or "
            "use --strategy cpu"
        )


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading ones: GGUF writers differ in whether [1, n] keeps its first dimension."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape
