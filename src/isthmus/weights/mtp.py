"""Layers at the end of a file that only guess further tokens: multi-token prediction, llama.cpp's NextN.

ARCH.block_count counts them, ARCH.nextn_predict_layers says how many of the last they are. Nothing here
guesses with them, so a `WeightSource` leaves their tensors out, and a model's layers are counted without.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container

from isthmus.weights.metadata import Metadata

_LAYER = re.compile(r"blk\.(\d{1,6})\.")


def mtp_layers(metadata: Metadata) -> range:
    """Their numbers, mostly none. Raises MalformedFileError unless there are fewer than layers."""
    arch = metadata.get("general.architecture")
    count = metadata.int(f"{arch}.nextn_predict_layers", 0, min=0)
    if count == 0:
        return range(0)
    layers = metadata.int(f"{arch}.block_count", min=1)
    if count >= layers:
        raise metadata.bad(f"{arch}.nextn_predict_layers", f"less than block_count = {layers}")
    return range(layers - count, layers)


def decoder_layers(metadata: Metadata) -> int:
    """Layers that compute the next token."""
    layers = metadata.int(f"{metadata.str('general.architecture')}.block_count", min=1)
    return layers - len(mtp_layers(metadata))


def in_layers(layers: Container[int]) -> Callable[[str], bool]:
    """Whether a tensor of this name belongs to one of them."""

    def holds(name: str) -> bool:
        match = _LAYER.match(name)
        return match is not None and int(match[1]) in layers

    return holds


def mtp_note(metadata: Metadata) -> str:
    """What is said of them where a model is planned and loaded; empty where there are none."""
    layers = mtp_layers(metadata)
    if not layers:
        return ""
    names = f"blk.{layers[0]}" + (f" to blk.{layers[-1]}" if len(layers) > 1 else "")
    which, them = ("layer", "it") if len(layers) == 1 else ("layers", "they")
    return f"MTP {which} not loaded: {names} of the file; {them} would only guess further tokens"
