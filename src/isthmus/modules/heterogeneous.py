"""One Mixture-of-Experts layer over two devices, by itself: for trying the idea, and for measuring it.

    layer = HeterogeneousMoELayer(hidden_dim=7168, ffn_dim=2048, num_experts=16, top_k=4)
    y, metrics = layer(x)      # x [batch, sequence, 7168]

    h = rms_norm(x);  ids, weights = router(h)
    -> submit h, ids and weights to the CPU;  the shared expert meanwhile;  <- wait for the sum of the chosen
    y = x + sum_j weights[j] expert[ids[j]](h) (+ shared(h))

What crosses between the devices are activations: h and the sum, 2 H bytes each a token in bf16, and k ids and
weights. `metrics` counts them as they were moved, beside the bytes of weights that an engine would have moved
that fetches the chosen experts instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from isthmus.config import RunOptions
from isthmus.formats.spec import by_name
from isthmus.modules.builder import Builder
from isthmus.modules.experts import Matrices, operator, pack_matrices
from isthmus.modules.loader import Loader
from isthmus.modules.router import RouterConfig
from isthmus.native import ops, rows
from isthmus.native.handoff import Handoff, Inline, Slot, Threaded, abandoned_if_failing, slot_rows
from isthmus.weights.memory import MemorySource
from isthmus.weights.source import RawTensor

DTYPES: dict[torch.dtype, Literal["f32", "bf16"]] = {torch.float32: "f32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class MoEMetrics:
    """Of one call. Bytes as they were moved; times in ms, all but the experts' one after the other."""

    tokens: int
    x_bytes: int  # rows given to the CPU
    y_bytes: int  # rows that came back
    routing_bytes: int  # ids and weights
    naive_weight_transfer_bytes: int  # of the different experts chosen, at the format's own bits per weight
    execution_time_ms: float
    router_ms: float  # norm, router
    handoff_ms: float  # copying rows into the slot
    cpu_experts_ms: float
    shared_expert_ms: float
    wait_ms: float

    @property
    def activation_transfer_bytes(self) -> int:
        return self.x_bytes + self.y_bytes + self.routing_bytes

    @property
    def bandwidth_savings_ratio(self) -> float:
        """How many times as much the weights would have been."""
        return self.naive_weight_transfer_bytes / max(1, self.activation_transfer_bytes)


class HeterogeneousMoELayer:
    """Norm, router and shared experts on one device, routed experts on the CPU in place.

    weights: tensors of a layer by their names in a GGUF file without `blk.N.` (ffn_norm.weight [H],
    ffn_gate_inp.weight [E, H], ffn_gate_exps.weight and ffn_up_exps.weight [E, F, H], ffn_down_exps.weight
    [E, H, F], ffn_*_shexp.weight), as torch tensors, kept in their dtype, or as a file's RawTensor. None:
    random ones of `weight_format`. dtype: of rows that cross. Not thread-safe.
    """

    def __init__(
        self,
        hidden_dim: int,
        ffn_dim: int,
        num_experts: int,
        top_k: int,
        *,
        num_shared_experts: int = 0,
        activation: Literal["silu", "gelu"] = "silu",
        weight_format: str = "q4_k",
        router: Literal["softmax", "sigmoid"] = "softmax",
        normalise: bool = True,
        eps: float = 1e-6,
        dtype: torch.dtype = torch.bfloat16,
        threaded: bool = True,
        weights: Mapping[str, Tensor | RawTensor] | None = None,
        seed: int = 0,
    ) -> None:
        """num_shared_experts: of ffn_dim each. threaded: the CPU works while the shared expert is computed.

        Raises ValueError for sizes that cannot be meant, MalformedFileError for weights of other sizes.
        """
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must be from 1 to the {num_experts} experts, got {top_k}")
        if dtype not in DTYPES:
            raise ValueError(f"rows cross as torch.bfloat16 or torch.float32, got {dtype}")
        shared_dim = num_shared_experts * ffn_dim
        if weights is None:
            shapes = _shapes(hidden_dim, ffn_dim, num_experts, shared_dim)
            source = MemorySource.random(shapes, by_name(weight_format), seed)
        else:
            source = MemorySource.of(weights)
        build = Builder(source, RunOptions())
        self._norm = build.norm("ffn_norm.weight", hidden_dim, eps)
        config = RouterConfig(router, num_experts, top_k, normalise)
        self._router = build.router(config, hidden_dim, bias=build.has("exp_probs_b.bias"))
        act = ops.Act(activation)
        routed = build.expert_matrices(hidden_dim, num_experts, ffn_dim, act=act)
        shared = build.shared_matrices(hidden_dim, shared_dim, act=act) if shared_dim else None
        self._experts = build.add(_Routed(routed))
        self._shared = build.add(_Routed(shared)) if shared else None
        build.finish()
        self.hidden_dim, self.top_k, self.dtype = hidden_dim, top_k, dtype
        self._expert_bytes = sum(raw.nbytes for raw in routed) // num_experts
        self._handoff: Handoff = (Threaded if threaded else Inline)(hidden_dim, top_k, dtype=DTYPES[dtype])
        self._handoff.set_experts(0, self._experts.native)
        self._slots: dict[int, Slot] = {}

    def __call__(self, x: Tensor) -> tuple[Tensor, MoEMetrics]:
        return self.forward(x)

    def forward(self, x: Tensor) -> tuple[Tensor, MoEMetrics]:
        """x [..., H] of any float dtype; y the same. Raises ValueError for another width, HandoffError."""
        if x.shape[-1] != self.hidden_dim or x.numel() == 0:
            raise ValueError(f"x is {tuple(x.shape)}; needed [..., {self.hidden_dim}], not empty")
        before, clock = self._handoff.counters(), _Clock()
        residual = x.detach().reshape(-1, self.hidden_dim).float().contiguous()
        tokens = residual.shape[0]
        with clock("router"):
            h = self._norm(residual)
            ids, weights = self._router(h)
        slot = self._slot(tokens)
        with clock("handoff"):
            given = h.to(self.dtype)
            self._handoff.submit(slot, tokens, given.data_ptr(), ids.data_ptr(), weights.data_ptr())
        with abandoned_if_failing(self._handoff):
            with clock("shared"):
                beside = self._shared(h) if self._shared else None
            returned = torch.empty(tokens, self.hidden_dim, dtype=self.dtype)
            with clock("wait"):
                self._handoff.wait(slot, returned.data_ptr())
        y = returned.float()
        shared = 0 if beside is None else beside.data_ptr()
        rows.join(y.data_ptr(), tokens, self.hidden_dim, shared=shared, residual=residual.data_ptr())
        after = self._handoff.counters()
        metrics = MoEMetrics(
            tokens=tokens,
            x_bytes=after.bytes_x - before.bytes_x,
            y_bytes=after.bytes_y - before.bytes_y,
            routing_bytes=after.bytes_routing - before.bytes_routing,
            naive_weight_transfer_bytes=len(set(ids.flatten().tolist())) * self._expert_bytes,
            execution_time_ms=clock.total_ms(),
            router_ms=clock.ms["router"],
            handoff_ms=clock.ms["handoff"],
            cpu_experts_ms=(after.experts_s - before.experts_s) * 1e3,
            shared_expert_ms=clock.ms["shared"],
            wait_ms=clock.ms["wait"],
        )
        return y.view(x.shape).to(x.dtype), metrics

    def close(self) -> None:
        """Ends the thread. Idempotent; the layer computes nothing afterwards."""
        self._handoff.close()

    def _slot(self, tokens: int) -> Slot:
        size = slot_rows(tokens)
        if size not in self._slots:
            self._slots[size] = self._handoff.register(0, size)
        return self._slots[size]


class _Routed:
    """Experts without routing of their own; as a shared one: every row takes expert 0."""

    def __init__(self, matrices: Matrices) -> None:
        self._raw = matrices

    def load(self, loader: Loader) -> None:
        self.native = operator(pack_matrices(loader, self._raw), exact=False)
        del self._raw

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self.native(x.data_ptr(), x.shape[0], 0, 0, 1, 0, out.data_ptr(), 0)
        return out


class _Clock:
    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.ms: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.ms[part] = (time.perf_counter() - started) * 1e3

    def total_ms(self) -> float:
        return (time.perf_counter() - self._started) * 1e3


def _shapes(hidden: int, inner: int, experts: int, shared: int) -> dict[str, tuple[int, ...]]:
    """Of a layer's tensors, by their names in a GGUF file."""
    shapes: dict[str, tuple[int, ...]] = {
        "ffn_norm.weight": (hidden,),
        "ffn_gate_inp.weight": (experts, hidden),
        "ffn_gate_exps.weight": (experts, inner, hidden),
        "ffn_up_exps.weight": (experts, inner, hidden),
        "ffn_down_exps.weight": (experts, hidden, inner),
    }
    if shared:
        shapes |= {
            "ffn_gate_shexp.weight": (shared, hidden),
            "ffn_up_shexp.weight": (shared, hidden),
            "ffn_down_shexp.weight": (hidden, shared),
        }
    return shapes
