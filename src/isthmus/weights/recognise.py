"""Says what a file is that should have been a model and is not.

Most failed loads are not damaged models but other files under the model's name: a pointer that Git LFS left,
a login page, another model format; or GGUF files that hold something beside a model. Looks at the first bytes
only, of GGUF files at the header, and never opens an archive or a pickle.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PREFIX_BYTES = 512

# First bytes -> what the file is and what to do about it.
_MAGICS: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive, perhaps a PyTorch checkpoint (.pt, .bin); convert the model to GGUF"),
    (b"\x1f\x8b", "gzip data; decompress it first (gunzip)"),
    (b"\xfd7zXZ\x00", "xz data; decompress it first (unxz)"),
    (b"\x28\xb5\x2f\xfd", "zstandard data; decompress it first (unzstd)"),
    (b"BZh", "bzip2 data; decompress it first (bunzip2)"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-zip archive; extract it first"),
    (b"\x80\x02", "a Python pickle (a PyTorch checkpoint), which is never opened; convert the model to GGUF"),
    (b"\x80\x04", "a Python pickle (a PyTorch checkpoint), which is never opened; convert the model to GGUF"),
    (b"\x89HDF", "an HDF5 file; convert the model to GGUF"),
    (b"FUGG", "a GGUF file in reversed byte order; convert it on, or for, a little-endian machine"),
    (b"lmgg", "a GGML file from before GGUF (2023); download a GGUF of the model"),
    (b"fmgg", "a GGML file from before GGUF (2023); download a GGUF of the model"),
    (b"tjgg", "a GGML file from before GGUF (2023); download a GGUF of the model"),
    (b"algg", "a GGML adapter from before GGUF (2023); it cannot be run"),
)

# What a GGUF file holds that is no model, by general.type.
_BESIDE_A_MODEL = {
    "adapter": "a LoRA adapter, which cannot be run here; take a model that it was merged into",
    "mmproj": "the image or sound encoder beside a model, which is not run here; take the model's own file",
    "imatrix": "an importance matrix, with which models are quantised; take the model itself",
    "controlvector": "a control vector, which cannot be run here; take the model itself",
}
_KIND_BY_ARCHITECTURE = {"clip": "mmproj", "imatrix": "imatrix", "controlvector": "controlvector"}


def what_else(metadata: Mapping[str, Any]) -> str | None:
    """What a GGUF file says that it holds instead of a model; None for a model."""
    kind = metadata.get("general.type")
    architecture = metadata.get("general.architecture")
    for name in (kind, _KIND_BY_ARCHITECTURE.get(architecture) if isinstance(architecture, str) else None):
        if isinstance(name, str) and name in _BESIDE_A_MODEL:
            return _BESIDE_A_MODEL[name]
    return None


def what_is(prefix: bytes, size: int) -> str:
    """`prefix`: the file's first PREFIX_BYTES (or all of it); `size`: its length in bytes."""
    if size == 0:
        return "an empty file; the download did not start or failed"
    if prefix.startswith(b"version https://git-lfs"):
        return _lfs_pointer(prefix)
    for magic, text in _MAGICS:
        if prefix.startswith(magic):
            return text
    if not prefix.strip(b"\x00"):
        return "a file that begins with zeros; the space was reserved but the download never finished"
    text_start = prefix.removeprefix(b"\xef\xbb\xbf").lstrip()[:64].lower()
    if text_start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "a web page; the server sent an error or login page instead of the model, download it again"
    if len(prefix) > 9 and prefix[8:9] == b"{" and int.from_bytes(prefix[:8], "little") < max(size, 1 << 32):
        return "a safetensors file; take the model in GGUF format"
    if text_start.startswith((b"{", b"[")):
        return f"JSON text, {_shown(prefix)}; the server sent an answer of its own instead of the model"
    if size < 4 and b"GGUF".startswith(prefix):
        return f"only {size} bytes long; the download is incomplete"
    if prefix.isascii() and not re.search(rb"[^\x20-\x7e\s]", prefix):
        return f"text, {_shown(prefix)}"
    return f"something else: it starts with the bytes {prefix[:8].hex(' ')}, a GGUF file with 'GGUF'"


def _lfs_pointer(prefix: bytes) -> str:
    length = re.search(rb"\nsize (\d{1,18})\n", prefix)
    real = f", the model has {int(length[1]) / 1e9:.2f} GB" if length else ""
    return f"the pointer that Git LFS leaves in a clone{real}; fetch the file itself with: git lfs pull"


def _shown(prefix: bytes) -> str:
    """The first 60 characters, quoted, on one line."""
    return repr(prefix[:60].decode(errors="replace"))
