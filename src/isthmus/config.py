"""Defaults, run options and the environment: the one place where each is read.

An option given in code or on the command line wins over the environment, which wins over the default. A
value that cannot be meant is a UsageError that names the option, what came and the range; nothing is clamped
in silence. No torch here: the command line and the HTTP process import this.

    ISTHMUS_ISA      instruction set of the CPU kernels (scalar, avx2, avx2vnni, avx512, amx)
    ISTHMUS_THREADS  worker threads of the CPU kernels
    ISTHMUS_FAKE_NUMA  pretended NUMA nodes, for testing: the code of many nodes on a machine of one
    ISTHMUS_CACHE    folder for files that Isthmus makes itself (the demo model, packed caches)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from isthmus.errors import UsageError

# Tokens in a block of the paged cache. A shorter block would cost a table look-up more often, a longer one
# waste memory at the end of each sequence; 64 is also the step of the kernels.
BLOCK_TOKENS = 64

# A context larger than this is only reserved when asked for: a model's own limit (128k and more) would take
# gigabytes of cache that a first try does not need.
DEFAULT_CONTEXT_TOKENS = 8192

# Rows of one prefill step: enough that experts of a 128-expert top-8 model see 32 rows each (the GEMM's
# unit), few enough that a cancelled request leaves soon: it does so between steps.
DEFAULT_CHUNK_TOKENS = 512

ISA_NAMES = ("scalar", "avx2", "avx2vnni", "avx512", "amx")
KV_DTYPES = ("bf16", "f32")

MAX_THREADS = 1024
MAX_NODES = 64
MAX_CONTEXT_TOKENS = 1 << 24


@dataclass(frozen=True)
class RunOptions:
    """How a model is run. None means: decide when the model is loaded (machine, file and memory say how)."""

    context_tokens: int | None = None  # prompt + answer of one request; None: min(model's, 8192, what fits)
    threads: int | None = None  # None: one per physical core this process may use
    fake_numa: int | None = None  # pretended NUMA nodes; None: the machine's, after a measurement
    isa: str | None = None  # None: the best the CPU has
    exact_batching: bool = False  # one driver for every row count: batched = alone, bit for bit
    kv_dtype: Literal["bf16", "f32"] = "bf16"
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS  # rows of one prefill step
    packed_cache: bool | None = None  # True: make one if there is none; False: none; None: use what is there

    def __post_init__(self) -> None:
        if self.context_tokens is not None:
            check_int("context_tokens", self.context_tokens, 2, MAX_CONTEXT_TOKENS)
        if self.threads is not None:
            check_int("threads", self.threads, 1, MAX_THREADS)
        if self.fake_numa is not None:
            check_int("fake_numa", self.fake_numa, 1, MAX_NODES)
        check_int("chunk_tokens", self.chunk_tokens, 1, 1 << 16)
        if self.isa is not None:
            check_choice("isa", self.isa, ISA_NAMES)
        check_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        if not isinstance(self.exact_batching, bool):
            raise UsageError(f"exact_batching must be True or False, got {self.exact_batching!r}")
        if self.packed_cache is not None and not isinstance(self.packed_cache, bool):
            raise UsageError(f"packed_cache must be True, False or None, got {self.packed_cache!r}")

    @classmethod
    def from_kwargs(cls, **options: Any) -> RunOptions:
        """Options by name, as `LLM(model, **options)` takes them; an unknown name is an error."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise UsageError(f"unknown option {name!r}; the options are {', '.join(known)}")
        return cls(**options)

    def with_environment(self, environ: Mapping[str, str] | None = None) -> RunOptions:
        """The same, with what was left open taken from the environment where that says something."""
        environ = os.environ if environ is None else environ
        return replace(
            self,
            isa=self.isa if self.isa is not None else _isa(environ),
            threads=self.threads
            if self.threads is not None
            else _count(environ, "ISTHMUS_THREADS", MAX_THREADS),
            fake_numa=self.fake_numa
            if self.fake_numa is not None
            else _count(environ, "ISTHMUS_FAKE_NUMA", MAX_NODES),
        )


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Folder for files that Isthmus makes itself: ISTHMUS_CACHE, else isthmus/ in the user's cache (XDG).

    It is not created here.
    """
    environ = os.environ if environ is None else environ
    own = environ.get("ISTHMUS_CACHE", "")
    if own:
        path = Path(own).expanduser()
        if not path.is_absolute():
            raise UsageError(f"ISTHMUS_CACHE must be an absolute path, got {own!r}")
        return path
    xdg = environ.get("XDG_CACHE_HOME", "")  # the XDG specification: a relative path is to be ignored
    base = Path(xdg) if xdg and Path(xdg).is_absolute() else Path.home() / ".cache"
    return base / "isthmus"


def check_int(name: str, value: object, low: int, high: int) -> None:
    """UsageError unless `value` is an int (bool is not) in low..high, both included."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UsageError(f"{name} must be a whole number from {low} to {high}, got {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _isa(environ: Mapping[str, str]) -> str | None:
    value = environ.get("ISTHMUS_ISA", "")
    if value:
        check_choice("ISTHMUS_ISA", value, ISA_NAMES)
    return value or None


def _count(environ: Mapping[str, str], name: str, most: int) -> int | None:
    """A number from 1 to `most`; None where the variable is not set, or empty."""
    value = environ.get(name, "")
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 6):
        raise UsageError(f"{name} must be a whole number from 1 to {most}, got {value!r}")
    check_int(name, int(value), 1, most)
    return int(value)
