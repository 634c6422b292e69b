"""What a strategy is given, and what it answers: modules, experts and cache in their places. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.placement.devices import Device
from isthmus.placement.parts import ModelParts
from isthmus.placement.profile import Profile

GIB = 1 << 30
HOST = "host"  # where experts are that no device holds

# The ring through which experts stream: chunks of so many experts, one arriving, one computing, one free.
RING_STAGES, RING_EXPERTS = 3, 16


@dataclass(frozen=True)
class Job:
    """What a strategy places."""

    strategy: str
    parts: ModelParts
    devices: tuple[Device, ...]
    ram_bytes: int  # that may be used on the host
    wanted_tokens: int
    may_shrink: bool  # a shorter context is better than none
    parallel: int  # contexts that share the cache, as far as there is room
    step_bytes: int  # activations of a step and logits
    process_bytes: int
    chunk_tokens: int  # rows of a prefill step
    decode_bytes: int = 0  # of each GPU, for attention's states
    captured_bytes: int = 0  # likewise, for captured decode steps
    mapped_bytes: int = 0  # of all matrices if they are pages of a packed cache, which need no memory
    to_disk: str = "`isthmus pack`"  # what runs a model from disk as far as memory goes, for who lacks memory
    profile: Profile | None = None
    cache_bytes: int = 0  # of each device, for experts that come and go
    below_bytes: int = 0  # of the host, for blocks of the cache on their way to tiers below it, or kept there
    streams: bool = True  # whether experts of long prompts may cross, under `hybrid`
    overlap: bool = False
    defer_experts: int = 0  # of each sampled token

    def shared_blocks(self, one_context: int, fit: int) -> int:
        """Blocks beyond one context's for the other requests: half of what is left, and no more than all use.

        They may be fewer than the longest contexts need: requests take blocks as they grow, and wait.
        """
        return max(0, min((self.parallel - 1) * one_context, (fit - one_context) // 2))

    @property
    def on_gpu(self) -> bool:
        return any(device.gpu for device in self.devices)

    @property
    def ring_bytes(self) -> int:
        """On each device, and as much pinned on the host."""
        gpu = self.on_gpu
        one = max((p.bytes_on(gpu=gpu) // max(1, p.count) for p in self.parts.experts.values()), default=0)
        most = max((part.count for part in self.parts.experts.values()), default=0)
        return RING_STAGES * min(RING_EXPERTS, most) * one


@dataclass(frozen=True)
class DevicePlan:
    """What one device holds, in bytes. layers: first and one past the last, (0, 0) for none."""

    name: str
    layers: tuple[int, int]
    weight_bytes: int  # without routed experts
    expert_bytes: int
    kv_bytes: int
    scratch_bytes: int
    free_bytes: int  # that may be filled; of RAM: shared by all that live there
    kv_token_bytes: int = 0

    @property
    def need_bytes(self) -> int:
        return self.weight_bytes + self.expert_bytes + self.kv_bytes + self.scratch_bytes


@dataclass(frozen=True)
class ExpertTable:
    """Where a layer's experts are: `resident` on the layer's device, slot i holding the i-th; others on the
    host. spare: slots after these, for experts that decoding turns out to use."""

    device: str
    count: int
    resident: tuple[int, ...] = ()
    spare: int = 0

    def place(self, expert: int) -> tuple[str, int]:
        """(device, slot), or (HOST, -1)."""
        if expert in self.resident:
            return self.device, self.resident.index(expert)
        return HOST, -1

    def slots(self) -> list[int]:
        """By expert: its slot, -1 on the host. What a kernel looks up."""
        table = [-1] * self.count
        for slot, expert in enumerate(self.resident):
            table[expert] = slot
        return table


@dataclass(frozen=True)
class Placement:
    modules: dict[str, str]  # module path -> device
    experts: dict[int, ExpertTable]  # by layer
    devices: tuple[DevicePlan, ...]
    num_blocks: int  # of the cache, BLOCK_TOKENS each
    tokens_fit: int  # at most, beside the weights
    mapped_bytes: int = 0  # of the weights on the host, pages of a packed cache
    ring: bool = False  # memory for streaming experts is set aside
    shared_blocks: int = 0  # of num_blocks, those beyond one context
    notes: tuple[str, ...] = ()
