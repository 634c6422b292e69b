"""Token embedding: rows read out of the packed tiles, so that a tied head and it are one tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.modules.loader import Loader
from isthmus.weights.source import RawTensor


class Embedding:
    def __init__(self, weights: RawTensor) -> None:
        """weights [vocab, hidden] in any format with a kernel."""
        self._raw = weights
        self.hidden = weights.shape[1]

    def load(self, loader: Loader) -> None:
        self._packed = loader.pack(self._raw)
        del self._raw

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens int32 [T], each below vocab (the batch's check); returns fp32 [T, hidden]."""
        out = torch.empty(tokens.shape[0], self.hidden)
        self._packed.rows_into(tokens.data_ptr(), tokens.shape[0], out.data_ptr())
        return out
