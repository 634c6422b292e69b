"""Grouped-query attention on a device: chunks by one kernel, decodes and short pieces by another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isthmus.engine.state import KeyValueCache
from isthmus.modules.attention import AttentionConfig
from isthmus.modules.attention import GroupedQueryAttention as NativeAttention
from isthmus.modules.loader import Loader
from isthmus.modules.on_gpu.step import DeviceStep
from isthmus.modules.on_gpu.target import Target
from isthmus.modules.on_gpu.weights import upload_vector
from isthmus.modules.rope import Rope, attention_scale

if TYPE_CHECKING:
    from isthmus.modules.builder import Builder


class GroupedQueryAttention(NativeAttention):
    def __init__(self, build: Builder, c: AttentionConfig, rope: Rope, target: Target) -> None:
        super().__init__(build, c, rope)
        self._target = target

    def load(self, loader: Loader) -> None:
        c = self.config
        self._tables = self.rope.on(self._target.device)
        q_norm, k_norm = (norm.weight if norm else None for norm in self.head_norms)
        self._norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": c.eps}
        self._scale = attention_scale(c.rope, c.head_dim)
        sinks = upload_vector(loader, self._raw_sinks, self._target) if self._raw_sinks else None
        self._seen = {"window": c.window, "sinks": sinks}
        del self._raw_sinks

    def __call__(  # type: ignore[override]  # a model on devices runs on their steps
        self, x: Tensor, residual: Tensor, step: DeviceStep, cache: KeyValueCache
    ) -> Tensor:
        """x, residual [T, hidden]; writes the step's keys and values to `cache`; a new [T, hidden]."""
        c, kernels = self.config, self._target.kernels
        self.rope.check(step.end_position)
        qkv = self._normed(self.qkv(x))  # bf16 [T, (heads + 2 kv_heads) * head_dim]
        kernels.rope_write(
            qkv,
            c.heads,
            c.kv_heads,
            *self._tables,
            self.rope.style,
            step.positions,
            step.slots,
            cache.keys,
            cache.values,
            **self._norms,
        )
        q = qkv[:, : c.heads * c.head_dim].view(-1, c.heads, c.head_dim)
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=x.device)
        for part in step.parts:
            these = slice(part.begin, part.end)
            if part.chunk is None:
                where = (part.sequences, part.positions, step.block_tables)
                kernels.decode(
                    q[these], cache.keys, cache.values, *where, self._scale, out[these], **self._seen
                )
            else:
                rows = part.end - part.begin
                to = (part.chunk.starts, part.positions, part.chunk.block_table, rows)
                kernels.prefill(
                    q[these], cache.keys, cache.values, *to, self._scale, out[these], **self._seen
                )
        return self.output(out.view(-1, c.heads * c.head_dim), residual)
