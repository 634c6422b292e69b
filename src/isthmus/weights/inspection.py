"""What a model file holds, also one that cannot run: tensors of any type, incomplete sets, wrong layouts.

Where `open_weights` refuses, this goes on and lists what is wrong as `problems`. Only a header that cannot be
followed to its end is an error. Data is not read.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from isthmus.errors import MalformedFileError, ModelFileError
from isthmus.formats.spec import cannot_run
from isthmus.weights.gguf_header import GgufHeader, TensorInfo, read_header
from isthmus.weights.gguf_layout import check_layout
from isthmus.weights.gguf_shards import check_set, shard_paths
from isthmus.weights.metadata import Metadata
from isthmus.weights.mtp import in_layers, mtp_layers
from isthmus.weights.recognise import what_else

_EXPERTS = re.compile(r"blk\.(\d{1,6})\.ffn_(gate|up|down|gate_up)(?:_exps\.weight|\.\d+\.weight)")


@dataclass(frozen=True)
class Tensor:
    """type: ggml's name, `type_ID` of an unknown one, whose bytes are what lies before the next tensor."""

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int
    offset: int
    file: str
    known: bool


@dataclass(frozen=True)
class TypeTotal:
    tensors: int = 0
    nbytes: int = 0
    parameters: int = 0


@dataclass(frozen=True)
class ExpertLayout:
    """Of the routed experts. formats: role -> type -> number of layers. separate: a tensor an expert."""

    layers: tuple[int, ...]
    count: int
    used: int
    nbytes: int
    one_nbytes: int  # of one expert, all roles, in the mean
    separate: bool
    formats: dict[str, dict[str, int]]


@dataclass(frozen=True)
class MtpLayers:
    """Those that only guess further tokens, which nothing here loads."""

    layers: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    path: str
    files: tuple[str, ...]
    nbytes: int
    version: int
    alignment: int
    architecture: str
    metadata: dict[str, Any]
    value_types: dict[str, str]
    tensors: tuple[Tensor, ...]
    types: dict[str, TypeTotal]
    experts: ExpertLayout | None
    tokenizer: dict[str, Any]
    template: dict[str, Any]
    mtp: MtpLayers | None = None
    problems: tuple[str, ...] = field(default=())


def inspect_file(path: Path) -> Inspection:
    """Raises ModelFileError for what is no GGUF file, or breaks off in its header."""
    first, problems = _header(path), list[str]()
    headers = [first]
    try:
        headers = [first if p == path else _header(p) for p in shard_paths(first)]
        check_set(headers)
    except MalformedFileError as error:
        problems.append(str(error))
    for header in headers:
        try:
            check_layout(header)
        except MalformedFileError as error:
            problems.append(str(error))
    tensors = tuple(_tensor(header, info) for header in headers for info in header.tensors)
    metadata = headers[0].metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        problems.append("general.architecture is missing or no text: not a model, perhaps an adapter")
    other = what_else(metadata)
    problems += [] if tensors else ["there is no tensor, perhaps a vocabulary alone"]
    problems += [] if other is None else [f"this is {other}"]
    mtp, problem = _mtp(tensors, Metadata(metadata, path))
    problems += problem
    left_out = in_layers(mtp.layers if mtp else ())
    infos = (info for header in headers for info in header.tensors)
    problems += cannot_run((info.name, info.format) for info in infos if not left_out(info.name))
    return Inspection(
        path=str(path),
        files=tuple(str(header.path) for header in headers),
        nbytes=sum(header.size for header in headers),
        version=first.version,
        alignment=first.alignment,
        architecture=architecture if isinstance(architecture, str) else "",
        metadata=metadata,
        value_types={key: kind.name for key, kind in headers[0].types.items()},
        tensors=tensors,
        types=_types(tensors),
        experts=_experts(tensors, metadata),
        tokenizer=_tokenizer(metadata),
        template=_template(metadata),
        mtp=mtp,
        problems=tuple(problems),
    )


def shown_value(value: Any, kind: str, longest: int = 70) -> str:
    """A value of the metadata on one line; an array as its beginning and its length."""
    if isinstance(value, list):
        head = ", ".join(shown_value(item, kind, 20) for item in value[:4])
        return f"[{head}{', ...' if len(value) > 4 else ''}] {len(value)} x {kind.lower()}"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"


def _header(path: Path) -> GgufHeader:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelFileError(f"{path}: cannot be opened: {reason}") from None
    try:
        return read_header(partial(os.pread, fd), os.fstat(fd).st_size, path, any_type=True)
    except OSError as error:  # a folder, a device
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)


def _tensor(header: GgufHeader, info: TensorInfo) -> Tensor:
    known = bool(info.format.block_bytes)
    return Tensor(info.name, info.shape, info.format.name, info.nbytes, info.offset, header.path.name, known)


def _parameters(tensor: Tensor) -> int:
    count = 1
    for dim in tensor.shape:
        count *= dim
    return count


def _types(tensors: tuple[Tensor, ...]) -> dict[str, TypeTotal]:
    totals: dict[str, TypeTotal] = {}
    for tensor in tensors:
        before = totals.get(tensor.type, TypeTotal())
        totals[tensor.type] = TypeTotal(
            before.tensors + 1, before.nbytes + tensor.nbytes, before.parameters + _parameters(tensor)
        )
    return dict(sorted(totals.items(), key=lambda item: -item[1].nbytes))


def _experts(tensors: tuple[Tensor, ...], metadata: dict[str, Any]) -> ExpertLayout | None:
    routed = [(match, tensor) for tensor in tensors if (match := _EXPERTS.fullmatch(tensor.name))]
    if not routed:
        return None
    separate = any("_exps" not in tensor.name for _, tensor in routed)
    layers = sorted({int(match[1]) for match, _ in routed})
    of_type: dict[str, dict[str, set[int]]] = {}
    for match, tensor in routed:
        of_type.setdefault(match[2], {}).setdefault(tensor.type, set()).add(int(match[1]))
    arch = metadata.get("general.architecture", "")
    counts = [metadata.get(f"{arch}.{key}", 0) for key in ("expert_count", "expert_used_count")]
    count, used = (number if isinstance(number, int) else 0 for number in counts)
    if not count and not separate:
        count = max(tensor.shape[0] for _, tensor in routed)
    nbytes = sum(tensor.nbytes for _, tensor in routed)
    return ExpertLayout(
        layers=tuple(layers),
        count=count,
        used=used,
        nbytes=nbytes,
        one_nbytes=nbytes // max(1, count * len(layers)),
        separate=separate,
        formats={role: {t: len(found) for t, found in types.items()} for role, types in of_type.items()},
    )


def _mtp(tensors: tuple[Tensor, ...], metadata: Metadata) -> tuple[MtpLayers | None, list[str]]:
    """And what is wrong with the keys that say so."""
    try:
        layers = mtp_layers(metadata)
    except MalformedFileError as error:
        return None, [str(error)]
    belongs = in_layers(layers)
    nbytes = sum(tensor.nbytes for tensor in tensors if belongs(tensor.name))
    return MtpLayers(tuple(layers), nbytes) if layers else None, []


def _tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    """Model, pre-tokenizer, sizes and the ids of special tokens with their texts."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return {}
    summary: dict[str, Any] = {
        "model": metadata.get("tokenizer.ggml.model"),
        "pre": metadata.get("tokenizer.ggml.pre"),
        "tokens": len(tokens),
        "merges": len(metadata.get("tokenizer.ggml.merges", ())),
    }
    for key, value in metadata.items():
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id") and isinstance(value, int):
            name = key.removeprefix("tokenizer.ggml.").removesuffix("_token_id")
            text = tokens[value] if 0 <= value < len(tokens) else None
            summary[name] = {"id": value, "text": text}
    return summary


def _template(metadata: dict[str, Any]) -> dict[str, Any]:
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str):
        return {}
    named = [key.rpartition(".")[2] for key in metadata if key.startswith("tokenizer.chat_template.")]
    return {
        "characters": len(template),
        "tools": "tools" in template,
        "reasoning": any(word in template for word in ("<think>", "reasoning_content", "enable_thinking")),
        "others": named,
    }
