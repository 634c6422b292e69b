"""Models of which only headers are known: in a repository of the hub, or in another quantisation.

Enough for a plan: metadata, and tensors that have names, shapes, formats and sizes but no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

from isthmus.errors import HubError
from isthmus.formats.spec import FormatSpec
from isthmus.weights.dummy import LazyTensor
from isthmus.weights.gguf_header import GgufHeader, read_header
from isthmus.weights.gguf_layout import check_layout
from isthmus.weights.gguf_shards import check_set
from isthmus.weights.hub import Hub, RepoFile, RepoModel
from isthmus.weights.identity import FileIdentity
from isthmus.weights.metadata import Metadata
from isthmus.weights.mtp import in_layers, mtp_layers
from isthmus.weights.quants import tensor_format
from isthmus.weights.source import RawTensor, WeightSource

# The first file of a set carries the vocabulary, 6 to 20 MB; the others a few KB of tensor names.
FIRST_BLOCK_BYTES, OTHER_BLOCK_BYTES = 2 << 20, 1 << 18
_SHARDS_AT_ONCE = 8


@dataclass(frozen=True)
class HeaderSource:
    """See `WeightSource`; reading a tensor's data raises HubError."""

    path: Path
    metadata: Metadata
    tensors: Mapping[str, RawTensor]

    def identity(self) -> list[FileIdentity]:
        return [FileIdentity(str(self.path), sum(t.nbytes for t in self.tensors.values()), 0, "")]

    def check(self, name: str) -> None: ...

    def release(self, name: str) -> None: ...

    def close(self) -> None: ...


def remote_source(hub: Hub, repo: str, model: RepoModel) -> HeaderSource:
    """The model's headers by range requests, a few MB in all. HubError, or what is wrong with a header."""

    def header(numbered: tuple[int, RepoFile]) -> GgufHeader:
        number, file = numbered
        block = OTHER_BLOCK_BYTES if number else FIRST_BLOCK_BYTES
        with hub.open(repo, file, block_bytes=block) as read_at:
            found = read_header(read_at, file.nbytes, Path(repo) / file.path)
        check_layout(found)
        return found

    with ThreadPoolExecutor(_SHARDS_AT_ONCE) as pool:
        headers = list(pool.map(header, enumerate(model.files)))
    check_set(headers)
    metadata = Metadata(headers[0].metadata, headers[0].path)
    left_out = in_layers(mtp_layers(metadata))
    tensors = {
        info.name: header_tensor(info.name, info.shape, info.format, one.path)
        for one in headers
        for info in one.tensors
        if not left_out(info.name)
    }
    return HeaderSource(headers[0].path, metadata, tensors)


def requantised(source: WeightSource, quant: str) -> HeaderSource:
    """The same model in another quantisation, as llama.cpp's quantiser would write it."""
    shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
    formats = _formats(source, shapes, quant)
    tensors = {name: header_tensor(name, shapes[name], formats[name], source.path) for name in shapes}
    return HeaderSource(source.path, source.metadata, tensors)


def quantised_bytes(source: WeightSource, quants: Iterable[str]) -> dict[str, int]:
    """Of the whole model, by quantisation."""
    shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
    return {
        quant: sum(
            prod(shapes[name][:-1]) * spec.row_bytes(shapes[name][-1])
            for name, spec in _formats(source, shapes, quant).items()
        )
        for quant in quants
    }


def _formats(
    source: WeightSource, shapes: Mapping[str, tuple[int, ...]], quant: str
) -> dict[str, FormatSpec]:
    arch = source.metadata.str("general.architecture")
    layers = source.metadata.int(f"{arch}.block_count", min=1)
    experts = source.metadata.int(f"{arch}.expert_count", 0, min=0)
    return {
        name: tensor_format(name, shape, quant, layers=layers, experts=experts)
        for name, shape in shapes.items()
    }


def header_tensor(name: str, shape: tuple[int, ...], spec: FormatSpec, file: Path) -> RawTensor:
    def refuse() -> memoryview:
        raise HubError(f"{file}: only the header of this model is known; download it to run it")

    return LazyTensor(name, shape, spec, refuse, file)
