"""Modules on a torch device: what their namesakes beside this package compute natively on the CPU.

A model's text is the same; `Builder` takes a module from here where a plan gives its tensors a device.
Weights are in device memory, the CPU's tiles as they are or bf16; activations between products are bf16 with
sums in fp32, and the residual is bf16 or fp32 (`Target`). Nothing reads device memory on the host in a decode
step, so one of static buffers (`DeviceStep.for_decodes`) can be captured in a CUDA graph.

`torch.device("cpu")` is a device like any other here, with the references in the kernels' place: the stand-in
by which all of this is tested. None of it has run on a GPU yet.
"""

from isthmus.modules.on_gpu.attention import GroupedQueryAttention
from isthmus.modules.on_gpu.dense import Embedding, Linear, RmsNorm
from isthmus.modules.on_gpu.experts import ResidentExperts, SplitExperts, routed_experts
from isthmus.modules.on_gpu.ffn import FeedForward
from isthmus.modules.on_gpu.mla import LatentAttention
from isthmus.modules.on_gpu.router import Router, SigmoidGate

__all__ = [
    "Embedding",
    "FeedForward",
    "GroupedQueryAttention",
    "LatentAttention",
    "Linear",
    "ResidentExperts",
    "RmsNorm",
    "Router",
    "SigmoidGate",
    "SplitExperts",
    "routed_experts",
]
