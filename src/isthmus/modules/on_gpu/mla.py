"""Multi-head latent attention on a device: absorbed for decodes, expanded for chunks (see modules/mla.py).

One bf16 form of kv_b serves both: of each head the key's rows before the value's, [heads, nope + value,
kv_lora]. Absorbed, a head's query meets its key rows from the left and its sums its value rows from the
right; expanded, latents meet all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isthmus.engine.state import LatentCache
from isthmus.modules.loader import Loader
from isthmus.modules.mla import KeyValueUp as NativeKeyValueUp
from isthmus.modules.mla import LatentAttention as NativeAttention
from isthmus.modules.mla import LatentConfig
from isthmus.modules.on_gpu.step import DevicePart, DeviceStep
from isthmus.modules.on_gpu.target import Target
from isthmus.modules.rope import Rope, attention_scale

if TYPE_CHECKING:
    from isthmus.modules.builder import Builder


class LatentAttention(NativeAttention):
    up: KeyValueUp

    def __init__(self, build: Builder, c: LatentConfig, rope: Rope, target: Target) -> None:
        self._target = target
        super().__init__(build, c, rope)

    def _make_up(self, build: Builder) -> KeyValueUp:
        return KeyValueUp(build, self.config, self._target)

    def load(self, loader: Loader) -> None:
        self._tables = self.rope.on(self._target.device)
        self._scale = attention_scale(self.config.rope, self.config.key)

    def __call__(  # type: ignore[override]  # a model on devices runs on their steps
        self, x: Tensor, residual: Tensor, step: DeviceStep, cache: LatentCache
    ) -> Tensor:
        """x, residual [T, hidden]; writes the step's latents to `cache`; a new [T, hidden]."""
        c = self.config
        self.rope.check(step.end_position)
        down = self.down(x)  # bf16
        q, kv = down[:, : -c.latent], down[:, -c.latent :]
        if c.q_lora:
            q = self.q_up(self.q_norm(q))
        q = q.view(-1, c.heads, c.key)
        out = torch.empty(x.shape[0], c.heads, c.value, dtype=torch.bfloat16, device=x.device)
        for part in step.parts:
            these = slice(part.begin, part.end)
            slots = step.slots if len(step.parts) == 1 else step.slots[these].clone()
            attend = self._decode if part.chunk is None else self._prefill
            attend(q[these], kv[these], slots, part, step, cache, out[these])
        return self.output(out.view(-1, c.heads * c.value), residual)

    def _decode(
        self,
        q: Tensor,
        kv: Tensor,
        slots: Tensor,
        part: DevicePart,
        step: DeviceStep,
        cache: LatentCache,
        out: Tensor,
    ) -> None:
        """q [T, heads, nope + rope], kv [T, latent]; out [T, heads, value] is overwritten."""
        c = self.config
        carried = torch.empty(len(q), c.heads, c.latent, dtype=torch.bfloat16, device=q.device)
        carried[..., : c.kv_lora] = self.up.carried(q[..., : c.nope])
        self._turn_and_store(q[..., c.nope :], carried[..., c.kv_lora :], kv, part, slots, cache)
        sums: Tensor = self._target.kernels.mla_decode(
            carried,
            cache.latent,
            c.rope.dim,
            part.sequences,
            part.positions,
            step.block_tables,
            self._scale,
        )
        out.copy_(self.up.values_of(sums))

    def _prefill(
        self,
        q: Tensor,
        kv: Tensor,
        slots: Tensor,
        part: DevicePart,
        step: DeviceStep,
        cache: LatentCache,
        out: Tensor,
    ) -> None:
        """The same for a chunk."""
        assert part.chunk
        turned = q[..., self.config.nope :]
        self._turn_and_store(turned, turned, kv, part, slots, cache)
        self._target.kernels.mla_prefill(
            q,
            cache.latent,
            part.chunk.block_table[0],
            part.positions,
            part.chunk.num_keys,
            self.up.kv_b,
            self.config.nope,
            self._scale,
            out,
        )

    def _turn_and_store(
        self, q: Tensor, q_out: Tensor, kv: Tensor, part: DevicePart, slots: Tensor, cache: LatentCache
    ) -> None:
        """Turns q [T, heads, rope] into q_out; writes kv [T, latent] normalised and turned."""
        self._target.kernels.latent_write(
            q,
            q_out,
            kv,
            *self._tables,
            self.rope.style,
            part.positions,
            slots,
            cache.latent,
            self.kv_norm.weight,
            self.config.eps,
        )


class KeyValueUp(NativeKeyValueUp):
    """kv_b: bf16 [heads * (nope + value), kv_lora], from either layout of the file."""

    def __init__(self, build: Builder, c: LatentConfig, target: Target) -> None:
        super().__init__(build, c)
        self._target = target

    def load(self, loader: Loader) -> None:
        c = self._config
        if self._joined:
            joined = loader.values(self._joined, torch.bfloat16)
        else:
            assert self._k_b
            assert self._v_b
            keys = loader.values(self._k_b, torch.bfloat16).transpose(1, 2)
            joined = torch.cat([keys, loader.values(self._v_b, torch.bfloat16)], dim=1)
        self._joined = self._k_b = self._v_b = None
        self.kv_b = joined.reshape(-1, c.kv_lora).to(self._target.device)
        self._of_heads = self.kv_b.view(c.heads, c.nope + c.value, c.kv_lora)

    def carried(self, q: Tensor) -> Tensor:
        """q bf16 [T, heads, nope] in the latent space: [T, heads, kv_lora]."""
        rows = self._of_heads[:, : self._config.nope]
        found: Tensor = self._target.kernels.batched_f32(q.transpose(0, 1), rows.transpose(1, 2))
        return found.transpose(0, 1)

    def values_of(self, sums: Tensor) -> Tensor:
        """Values of sums of latents, bf16 [T, heads, kv_lora]: [T, heads, value]."""
        rows = self._of_heads[:, self._config.nope :]
        found: Tensor = self._target.kernels.batched_f32(sums.transpose(0, 1), rows)
        return found.transpose(0, 1)
