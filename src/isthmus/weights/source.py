"""What a model file is to the rest of the project: metadata and named raw tensors.

The invariant of every source: once `open_weights` has returned, all sizes, offsets, names and formats are
checked against the files, so that nobody above has to. Tensor data is read when somebody uses it, not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from isthmus.formats.spec import FormatSpec
from isthmus.weights.identity import FileIdentity
from isthmus.weights.metadata import Metadata

# Tensors beside NAME.weight that belong to it, NAME.ROLE. `scale`: one value or one per expert, by which the
# weights are to be multiplied. `input_scale`: for engines that round activations to 4 bits; not used here.
COMPANIONS = ("scale", "input_scale")

# How the name of a model without a file begins.
DUMMY = "dummy:"


@dataclass(frozen=True)
class RawTensor:
    """A tensor as it stands in its file.

    shape: outermost first, as torch writes it: [experts, N, K]; K is a multiple of format.block_columns.
    data: read-only uint8 view into the mapped file, exactly `nbytes` long; it keeps the mapping alive.
    aux: companion tensors by role, see COMPANIONS; most tensors have none.
    """

    name: str
    shape: tuple[int, ...]
    format: FormatSpec
    data: memoryview
    file: Path
    aux: Mapping[str, RawTensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class WeightSource(Protocol):
    """An open model. `path` is the file that holds the metadata (of a split set: the first shard)."""

    @property
    def path(self) -> Path: ...

    @property
    def metadata(self) -> Metadata: ...

    @property
    def tensors(self) -> Mapping[str, RawTensor]:
        """In file order, without those of MTP layers (`mtp.py`). Fetching one checks its file as `check`
        does."""

    def identity(self) -> list[FileIdentity]:
        """What tells this model from another one, or from itself before a change."""

    def check(self, name: str) -> None:
        """MalformedFileError if the tensor's file changed since it was opened; call it just before reading
        data.

        A mapped file that becomes shorter after that raises SIGBUS when its missing part is read: watch what
        is read (`native.watch`).
        """

    def release(self, name: str) -> None:
        """Say that the tensor's bytes have been consumed: its pages leave this process, see `gguf.py`."""

    def close(self) -> None:
        """Give up files and mappings. Views that are still held stay valid, and keep their mapping."""


def open_weights(path: Path | str) -> WeightSource:
    """Open a model by any of its files, or a `dummy:` by its name; reads headers only.

    Raises MalformedFileError or UnsupportedError, which name file, tensor or key, what came and what was
    needed.
    """
    # Imported here, since they need RawTensor from this module.
    if is_dummy(path):
        from isthmus.weights.dummy import DummySource

        return DummySource(str(path))
    from isthmus.weights.gguf import GgufSource

    return GgufSource(Path(path))


def is_dummy(path: Path | str) -> bool:
    """Whether this is a model without a file, see `dummy.py`."""
    return str(path).startswith(DUMMY)
