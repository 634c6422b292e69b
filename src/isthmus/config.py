"""Defaults, run options and the environment: the one place where each is read.

An option given in code or on the command line wins over the environment, which wins over the default. A
value that cannot be meant is a UsageError that names the option, what came and the range; nothing is clamped
in silence. No torch here: the command line and the HTTP process import this.

    ISTHMUS_ISA      instruction set of the CPU kernels (scalar, avx2, avx2vnni, avx512, amx)
    ISTHMUS_THREADS  worker threads of the CPU kernels
    ISTHMUS_FAKE_NUMA  pretended NUMA nodes, for testing: the code of many nodes on a machine of one
    ISTHMUS_DEVICE   where a model runs: cpu, cuda, cuda:0, cuda:0,1
    ISTHMUS_CACHE    folder for files that Isthmus makes itself (the demo model, packed caches)
    ISTHMUS_HISTORY  lines typed in chats that are kept there for arrow-up; 0 keeps none
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from isthmus.errors import UsageError
from isthmus.formats.kv_cache import KV_DTYPES, KvDtype

# Tokens in a block of the paged cache. A shorter block would cost a table look-up more often, a longer one
# waste memory at the end of each sequence; 64 is also the step of the kernels.
BLOCK_TOKENS = 64

# Rows of the largest decode step that is recorded and run again as one native call, and that has slots of its
# own in a hand-off, which a record names. A larger one spends so long in its products that Python between the
# layers no longer counts.
MAX_CAPTURED_ROWS = 32

# From so many rows of one sequence on, modules may take them as a chunk, by other operators than for rows.
MIN_CHUNK_ROWS = 32

# Rows of a prompt whose logits stand in memory at once, where its log-probabilities are asked for: 64 of a
# vocabulary of 152k are 39 MB, and the head is read from memory once for all of them.
PROMPT_LOGIT_ROWS = 64

# Tokens guessed at once by speculation, at most: as many more rows of a step want logits.
MAX_DRAFT = 16

# A context larger than this is only reserved when asked for: a model's own limit (128k and more) would take
# gigabytes of cache that a first try does not need.
DEFAULT_CONTEXT_TOKENS = 8192

# Rows of one prefill step: enough that experts of a 128-expert top-8 model see 32 rows each (the GEMM's
# unit), few enough that a cancelled request leaves soon: it does so between steps.
DEFAULT_CHUNK_TOKENS = 512

# Requests computed together by `serve` and `LLM`. Dense weights and the interpreter are paid for once a step
# however many there are, experts by each; the cache is asked to hold so many contexts.
DEFAULT_PARALLEL = 8

# Lines typed in chats, for the next one: as many as bash keeps.
DEFAULT_HISTORY_LINES, MAX_HISTORY_LINES = 500, 100_000

# Copies of the cache's blocks that wait to be written to --kv-disk: 40 blocks of 48 layers with 4 heads of
# 128, which take seconds at the least to be computed.
KV_DISK_QUEUE_BYTES = 256 << 20

# Texts of so many characters are long: they are rendered and tokenised apart from others, in a process that
# has what others leave of the cores, so that neither short texts nor the engine's threads wait for them. So
# many characters are rendered and tokenised in about 0.1 s.
LONG_TEXT_CHARACTERS = 1 << 16
LOW_PRIORITY_NICE = 10

ISA_NAMES = ("scalar", "avx2", "avx2vnni", "avx512", "amx")
RESIDUAL_DTYPES = ("bf16", "f32")
SPECULATE = ("off", "ngram")
STRATEGIES = ("auto", "cpu", "stream", "hybrid", "gpu")  # the table is placement/strategies


MAX_THREADS = 1024
MAX_EXPERTS_PER_TOKEN = 1024
MAX_NODES = 64
MAX_DEVICES = 16
MAX_PARALLEL = 1024
MAX_BYTES = 1 << 50
MAX_CONTEXT_TOKENS = 1 << 24


@dataclass(frozen=True)
class RunOptions:
    """How a model is run. None means: decide when the model is loaded (machine, file and memory say how)."""

    context_tokens: int | None = None  # prompt + answer of one request; None: min(model's, 8192, what fits)
    threads: int | None = None  # None: one per physical core this process may use
    fake_numa: int | None = None  # pretended NUMA nodes; None: the machine's, after a measurement
    isa: str | None = None  # None: the best the CPU has
    exact_batching: bool = False  # one driver for every row count: batched = alone, bit for bit
    kv_dtype: KvDtype = "bf16"  # q8_0 is approximate
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS  # rows of one prefill step
    parallel: int = 1  # requests computed together, for which the cache is sized as far as memory allows
    speculate: Literal["off", "ngram"] = "off"  # ngram: guesses from what stands in the prompt and answer
    kv_ram: int | None = None  # bytes of host memory for blocks that a GPU's cache gives up
    kv_disk: str | None = None  # folder where full blocks of the cache are kept too; they outlive the process
    kv_disk_size: int = 16 << 30  # bytes that it may hold for this model
    packed_cache: bool | None = None  # True: make one if there is none; False: none; None: use what is there
    strategy: Literal["auto", "cpu", "stream", "hybrid", "gpu"] = "auto"
    device: str | None = None  # see parse_devices; None: every GPU that can be used, else the CPU
    gpu_memory: int | None = None  # bytes of each GPU that may be filled; None: what is free
    profile: str | None = None  # a file of `isthmus profile`: which experts are worth a GPU's memory
    expert_cache: int | None = None  # bytes of each device for experts that decoding turns out to use
    # Rows from which an expert of a long prompt's step is copied to the device and computed there. None: what
    # a GPU's link and the CPU's products, measured at the start, say; with CPU threads in its place: never.
    stream_rows: int | None = None
    # Rows between layers and over the bus. None: bf16 on a GPU; f32 on the CPU, whose kernels know no other.
    residual_dtype: Literal["bf16", "f32"] | None = None
    defer_experts: int = 0  # of a sampled token, of lowest weight, that join a layer late: approximate
    overlap: bool = False  # two halves of a step alternate between the device and the CPU's experts

    def __post_init__(self) -> None:
        if self.context_tokens is not None:
            check_int("context_tokens", self.context_tokens, 2, MAX_CONTEXT_TOKENS)
        if self.threads is not None:
            check_int("threads", self.threads, 1, MAX_THREADS)
        if self.fake_numa is not None:
            check_int("fake_numa", self.fake_numa, 1, MAX_NODES)
        check_int("chunk_tokens", self.chunk_tokens, 1, 1 << 16)
        check_int("parallel", self.parallel, 1, MAX_PARALLEL)
        check_choice("speculate", self.speculate, SPECULATE)
        if self.kv_ram is not None:
            check_int("kv_ram", self.kv_ram, 1, MAX_BYTES)
        check_int("kv_disk_size", self.kv_disk_size, 1, MAX_BYTES)
        if self.kv_disk is not None and (not isinstance(self.kv_disk, str) or not self.kv_disk):
            raise UsageError(f"kv_disk must be a folder, got {self.kv_disk!r}")
        if self.isa is not None:
            check_choice("isa", self.isa, ISA_NAMES)
        check_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        if not isinstance(self.exact_batching, bool):
            raise UsageError(f"exact_batching must be True or False, got {self.exact_batching!r}")
        if self.packed_cache is not None and not isinstance(self.packed_cache, bool):
            raise UsageError(f"packed_cache must be True, False or None, got {self.packed_cache!r}")
        if not isinstance(self.overlap, bool):
            raise UsageError(f"overlap must be True or False, got {self.overlap!r}")
        check_int("defer_experts", self.defer_experts, 0, MAX_EXPERTS_PER_TOKEN)
        if self.residual_dtype is not None:
            check_choice("residual_dtype", self.residual_dtype, RESIDUAL_DTYPES)
        check_choice("strategy", self.strategy, STRATEGIES)
        if self.gpu_memory is not None:
            check_int("gpu_memory", self.gpu_memory, 1, MAX_BYTES)
        if self.expert_cache is not None:
            check_int("expert_cache", self.expert_cache, 1, MAX_BYTES)
        if self.stream_rows is not None:
            check_int("stream_rows", self.stream_rows, 1, 1 << 20)
        if self.profile is not None and not isinstance(self.profile, str):
            raise UsageError(f"profile must be the path of a file, got {self.profile!r}")
        for name in ("profile", "expert_cache", "stream_rows", "overlap", "defer_experts"):
            if getattr(self, name) not in (None, False, 0) and self.strategy not in ("auto", "hybrid"):
                raise UsageError(
                    f"{name} is about experts that a device shares with the CPU; strategy {self.strategy} "
                    "shares none: choose hybrid, or leave it out"
                )
        on_gpu = any(name.startswith("cuda") for name in self.devices)  # what is malformed is said here
        if self.strategy == "cpu" and on_gpu:
            raise UsageError(
                f"strategy cpu uses no GPU, but the device is {self.device}; leave one of them out"
            )
        on_cpu = self.strategy == "cpu" or bool(self.devices and not on_gpu)
        if on_cpu and self.residual_dtype == "bf16":
            raise UsageError("residual_dtype bf16 is for a GPU; the CPU's kernels keep rows in f32")
        if self.strategy == "cpu" and self.gpu_memory is not None:
            raise UsageError("strategy cpu uses no GPU, so gpu_memory limits nothing; leave one of them out")
        if self.strategy == "cpu" and self.kv_ram is not None:
            raise UsageError(
                "kv_ram is for what a GPU's cache gives up; strategy cpu has its cache in RAM: leave one of "
                "them out (a longer --ctx, or more --parallel, makes that cache larger)"
            )
        stand_in = self.devices[:1] != ("cpu",) or self.gpu_memory is not None
        if self.devices and not on_gpu and stand_in and self.strategy in ("auto", "cpu"):
            raise UsageError(
                f"device {self.device}{' with gpu_memory' if self.gpu_memory else ''} is for a split between "
                "CPU threads and CPU threads; choose strategy stream, hybrid or gpu"
            )

    @classmethod
    def from_kwargs(cls, **options: Any) -> RunOptions:
        """Options by name, as `LLM(model, **options)` takes them; an unknown name is an error."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise UsageError(f"unknown option {name!r}; the options are {', '.join(known)}")
        for name in ("gpu_memory", "expert_cache", "kv_ram", "kv_disk_size"):
            if isinstance(options.get(name), str):
                options[name] = parse_bytes(name, options[name])
        for name in ("profile", "kv_disk"):
            if isinstance(options.get(name), Path):
                options[name] = str(options[name])
        return cls(**options)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices asked for, as torch names them; `cuda` alone for every GPU; none: not said."""
        return () if self.device is None else parse_devices("device", self.device)

    @property
    def asks_for_gpu(self) -> bool:
        """Whether running on the CPU alone would not be what was said."""
        split = self.strategy in ("stream", "hybrid", "gpu") or self.gpu_memory is not None
        return any(name.startswith("cuda") for name in self.devices) or (split and not self.devices)

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
            device=self.device if self.device is not None or self.strategy == "cpu" else _device(environ),
        )


def history_lines(environ: Mapping[str, str] | None = None) -> int:
    """ISTHMUS_HISTORY: how many of the lines typed in chats are kept."""
    lines = _count(os.environ if environ is None else environ, "ISTHMUS_HISTORY", MAX_HISTORY_LINES, least=0)
    return DEFAULT_HISTORY_LINES if lines is None else lines


def environment() -> Mapping[str, str]:
    """The process's, for who only says what is in it (`isthmus doctor`)."""
    return os.environ


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
    try:
        base = Path(xdg) if xdg and Path(xdg).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # neither HOME nor an entry in the list of users: some containers
        raise UsageError("this user has no home folder; set ISTHMUS_CACHE to a folder to write to") from None
    return base / "isthmus"


def tokenize_in_calling_thread() -> None:
    """Tells tokenizers, whose only switch is the environment, that a text is the calling thread's own work.

    Else it goes to threads of its own, which have neither the caller's priority nor another text's to share.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def parse_devices(name: str, text: str) -> tuple[str, ...]:
    """`cuda:0,1` -> (cuda:0, cuda:1). `cuda` is every GPU; `cpu` the CPU, with a strategy that splits a model
    its threads in a GPU's place; `cpu:0,1` two such devices."""
    kind, colon, rest = (text if isinstance(text, str) else "").partition(":")
    numbers = rest.split(",") if colon else []
    plain = all(number.isascii() and number.isdigit() and len(number) <= 4 for number in numbers)
    if kind not in ("cpu", "cuda") or not plain:
        raise UsageError(f"{name} must be cpu, cuda, cuda:0 or cuda:0,1, got {text!r}")
    found = tuple(f"{kind}:{int(number)}" for number in numbers) or (kind,)
    if len(set(found)) != len(found) or len(found) > MAX_DEVICES:
        raise UsageError(f"{name} names up to {MAX_DEVICES} devices, each once, got {text!r}")
    return found


def parse_bytes(name: str, text: str) -> int:
    """`20GiB`, `20GB`, `512M`, `1048576` -> bytes. Without i and B the unit is a power of two."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*(?:([KMGT])(i?)(B?))?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"{name} must be a size such as 20GiB, 20GB or 512M, got {text!r}")
    number, unit, binary, byte = match.groups()
    base = 1000 if unit and byte and not binary else 1024
    value = round(float(number) * float(base) ** ("KMGT".index(unit.upper()) + 1 if unit else 0))
    check_int(name, value, 1, MAX_BYTES)
    return value


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


def _device(environ: Mapping[str, str]) -> str | None:
    value = environ.get("ISTHMUS_DEVICE", "")
    if value:
        parse_devices("ISTHMUS_DEVICE", value)
    return value or None


def _count(environ: Mapping[str, str], name: str, most: int, least: int = 1) -> int | None:
    """A number from `least` to `most`; None where the variable is not set, or empty."""
    value = environ.get(name, "")
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 6):
        raise UsageError(f"{name} must be a whole number from {least} to {most}, got {value!r}")
    check_int(name, int(value), least, most)
    return int(value)
