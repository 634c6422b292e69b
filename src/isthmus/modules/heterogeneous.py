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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from isthmus.config import RunOptions
from isthmus.errors import MalformedFileError
from isthmus.formats.spec import by_name
from isthmus.gpu.fp8 import Fp8Matrix
from isthmus.modules.builder import Builder
from isthmus.modules.experts import Gated
from isthmus.modules.fp8 import without_fp8
from isthmus.modules.on_gpu.target import Target, Targets
from isthmus.modules.one_layer import OnCpu, OnDevice, OneExpert, SharedFfn, Side, usable
from isthmus.modules.router import RouterConfig
from isthmus.native import ops
from isthmus.native.handoff import Handoff, Inline, Slot, Threaded, abandoned_if_failing, on_stream, slot_rows
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
    random ones. Matrices may be torch.float8_e4m3fn with their scales beside them (modules/fp8.py): a device
    multiplies by such a shared expert as it is; what the CPU multiplies by is packed anew in `weight_format`,
    and `packed_anew` names it. dtype: of rows that cross. Not thread-safe.
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
        weight_format: str | None = None,
        router: Literal["softmax", "sigmoid"] = "softmax",
        normalise: bool = True,
        eps: float = 1e-6,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        threaded: bool = True,
        weights: Mapping[str, Tensor | RawTensor] | None = None,
        seed: int = 0,
    ) -> None:
        """num_shared_experts: of ffn_dim each. weight_format: of random matrices (None: q4_k), or of what was
        FP8 (None: q8_0). device: of all but the routed experts, such as "cuda:0", or "cpu" for torch's own
        products in a GPU's place; None: the CPU's native ones. threaded: the CPU works while the shared
        expert is computed.

        Raises ValueError for sizes that cannot be meant, MalformedFileError for weights of other sizes,
        DeviceError and HandoffError for a device that is not there or cannot give work to the CPU.
        """
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must be from 1 to the {num_experts} experts, got {top_k}")
        if dtype not in DTYPES:
            raise ValueError(f"rows cross as torch.bfloat16 or torch.float32, got {dtype}")
        target = None if device is None else Target.of(usable(device), residual=dtype)
        shared_dim = num_shared_experts * ffn_dim
        if weights is None:
            shapes = _shapes(hidden_dim, ffn_dim, num_experts, shared_dim)
            weights = MemorySource.random(shapes, by_name(weight_format or "q4_k"), seed).tensors
        stays = "_shexp." if target else None
        given, fp8, self.packed_anew = without_fp8(weights, stays, by_name(weight_format or "q8_0"))
        build = Builder(MemorySource.of(given), RunOptions(), targets=Targets.one(target) if target else None)
        norm = build.norm("ffn_norm.weight", hidden_dim, eps)
        config = RouterConfig(router, num_experts, top_k, normalise)
        choose = build.router(config, hidden_dim, bias=build.has("exp_probs_b.bias"))
        act = ops.Act(activation)
        routed = build.expert_matrices(hidden_dim, num_experts, ffn_dim, act=act)
        experts = build.add(OneExpert(routed))
        self._side: Side
        if target is None:
            shared = build.shared_matrices(hidden_dim, shared_dim, act=act) if shared_dim else None
            self._side = OnCpu(norm, choose, build.add(OneExpert(shared)) if shared else None)
        else:
            beside = _shared_of(build, fp8, hidden_dim, shared_dim, act) if shared_dim else None
            self._side = OnDevice(
                target, norm, choose, build.add(SharedFfn(target, beside)) if beside else None
            )
        build.finish()
        self.hidden_dim, self.top_k, self.dtype = hidden_dim, top_k, dtype
        self._expert_bytes = sum(raw.nbytes for raw in routed) // num_experts
        self._handoff = _handoff(self._side.device, threaded, hidden_dim, top_k, dtype)
        self._handoff.set_experts(0, experts.native)
        self._slots: dict[int, Slot] = {}

    def __call__(self, x: Tensor) -> tuple[Tensor, MoEMetrics]:
        return self.forward(x)

    def forward(self, x: Tensor) -> tuple[Tensor, MoEMetrics]:
        """x [..., H] of any float dtype; y the same, where x is. Raises ValueError for another width,
        HandoffError."""
        if x.shape[-1] != self.hidden_dim or x.numel() == 0:
            raise ValueError(f"x is {tuple(x.shape)}; needed [..., {self.hidden_dim}], not empty")
        with self._side.here():
            return self._forward(x)

    def _forward(self, x: Tensor) -> tuple[Tensor, MoEMetrics]:
        side, handoff = self._side, self._handoff
        before, clock = handoff.counters(), side.clock()
        residual = side.residual(x)
        tokens = len(residual)
        with clock("router"):
            h, ids, weights = side.choose(residual)
        slot, stream = self._slot(tokens), side.stream()
        with clock("handoff"):
            given = h.to(self.dtype)
            addresses = given.data_ptr(), ids.data_ptr(), weights.data_ptr()
            handoff.submit(slot, tokens, *addresses, stream=stream)
        with abandoned_if_failing(handoff):
            with clock("shared"):
                shared = side.shared(h, residual)
            returned = torch.empty(tokens, self.hidden_dim, dtype=self.dtype, device=side.device)
            with clock("wait"):
                handoff.wait(slot, returned.data_ptr(), stream=stream)
            y = side.add(returned, shared, residual).view(x.shape).to(x.device, x.dtype)
            total_ms = clock.total_ms()
            side.finish(handoff)
        after = handoff.counters()
        metrics = MoEMetrics(
            tokens=tokens,
            x_bytes=after.bytes_x - before.bytes_x,
            y_bytes=after.bytes_y - before.bytes_y,
            routing_bytes=after.bytes_routing - before.bytes_routing,
            naive_weight_transfer_bytes=len(set(ids.flatten().tolist())) * self._expert_bytes,
            execution_time_ms=total_ms,
            router_ms=clock.ms("router"),
            handoff_ms=clock.ms("handoff"),
            cpu_experts_ms=(after.experts_s - before.experts_s) * 1e3,
            shared_expert_ms=clock.ms("shared"),
            wait_ms=clock.ms("wait"),
        )
        return y, metrics

    def close(self) -> None:
        """Ends the thread. Idempotent; the layer computes nothing afterwards."""
        self._handoff.close()

    def _slot(self, tokens: int) -> Slot:
        size = slot_rows(tokens)
        if size not in self._slots:
            self._slots[size] = self._handoff.register(0, size)
        return self._slots[size]


def _handoff(device: torch.device, threaded: bool, hidden: int, top_k: int, dtype: torch.dtype) -> Handoff:
    if device.type == "cuda":
        return on_stream(hidden, top_k, dtype=DTYPES[dtype], device=device.index)[0]
    return (Threaded if threaded else Inline)(hidden, top_k, dtype=DTYPES[dtype])


def _shared_of(
    build: Builder, fp8: Mapping[str, Fp8Matrix], hidden: int, inner: int, act: ops.Act
) -> Gated[RawTensor | Fp8Matrix]:
    """The shared expert's matrices, some or all of them FP8."""

    def one(name: str, *shape: int) -> RawTensor | Fp8Matrix:
        if name not in fp8:
            return build.matrix(name, *shape)
        if fp8[name].shape != shape:
            raise MalformedFileError(f"{name} is {list(fp8[name].shape)}, needed {list(shape)}")
        return fp8[name]

    return Gated(
        one("ffn_gate_shexp.weight", inner, hidden),
        one("ffn_up_shexp.weight", inner, hidden),
        one("ffn_down_shexp.weight", hidden, inner),
        act,
    )


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
