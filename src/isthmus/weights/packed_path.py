"""Where the packed cache of a model is."""

from __future__ import annotations

import hashlib
from pathlib import Path

from isthmus.config import cache_dir

SUFFIX = ".packed"


def cache_path(model: Path) -> Path:
    """Where the cache of a model is, by its first file."""
    real = model.resolve()
    key = hashlib.blake2b(str(real).encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
    return cache_dir() / "packed" / f"{real.name.removesuffix('.gguf')}-{key}{SUFFIX}"
