"""The extension module as `ops.py` and the tests see it. Addresses are ints (0: absent), counts are ints."""

from collections.abc import Sequence

# Recorded steps, time by kind of operator: bindings/program.cpp
class Program:
    def __init__(self) -> None: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...
    def run(self) -> None: ...
    def __len__(self) -> int: ...

def op_seconds() -> dict[str, float]: ...

# Instruction sets, threads, bandwidth: bindings/machine.cpp
def isa_names() -> list[str]: ...
def use_isa(name: str) -> None: ...
def current_isa() -> str: ...
def set_threads(threads: int, nodes: int = 0) -> None: ...
def num_threads() -> int: ...
def num_nodes() -> int: ...

class Cpu:
    @property
    def id(self) -> int: ...
    @property
    def core(self) -> int: ...
    @property
    def node(self) -> int: ...
    @property
    def efficient(self) -> bool: ...

class Topology:
    @property
    def cpus(self) -> list[Cpu]: ...
    @property
    def quota(self) -> float: ...
    @property
    def num_cores(self) -> int: ...
    @property
    def nodes(self) -> list[int]: ...
    @property
    def default_threads(self) -> int: ...

def read_topology(root: str, affinity: Sequence[int], /) -> Topology: ...
def this_machine() -> Topology: ...
def node_bytes(root: str, node: int, /) -> int: ...
def pool_layout(machine: Topology, threads: int, nodes: int, /) -> list[tuple[int, list[int]]]: ...
def pool_may_spin(machine: Topology, threads: int, /) -> bool: ...

class ReadProbe:
    def __init__(self, nbytes: int, job_bytes: int = 0) -> None: ...
    def run(self, seconds: float) -> float: ...

def copy_seconds(address: int, nbytes: int, /) -> float: ...
def multiply_gops(policy: str, seconds: float, /) -> float: ...

class PoolTrace:
    @property
    def visits(self) -> list[int]: ...
    @property
    def workers(self) -> list[int]: ...
    @property
    def longest(self) -> int: ...

def pool_trace(items: int, grain: int, slow_worker: int, item_us: int, throw_at: int) -> PoolTrace: ...
def pool_parts(items: Sequence[int], grain: int, awake: int, /) -> list[tuple[int, int, int]]: ...
def pool_round_trips(jobs: int, item_ns: int, gap_ns: int, /) -> list[int]: ...
def pool_nested(outer: int, inner: int) -> int: ...
def pool_scratch(items: int, nbytes: int) -> bool: ...

# Packed weights: bindings/weights.cpp
class PackedWeight:
    @property
    def format_id(self) -> int: ...
    @property
    def format_name(self) -> str: ...
    @property
    def experts(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def file_nbytes(self) -> int: ...
    def tiles(self) -> bytes: ...
    def unpack(self) -> bytes: ...
    def set_factors(self, factors: Sequence[float], /) -> None: ...
    def rows_into(self, ids: int, count: int, out: int, /) -> None: ...

def pack(
    data: int, nbytes: int, format_id: int, experts: int, rows: int, columns: int, /
) -> PackedWeight: ...

class WatchedRange:
    def __init__(self, address: int, nbytes: int, /) -> None: ...
    @property
    def lost(self) -> bool: ...

class MappedFile:
    def __init__(self, fd: int, nbytes: int, /) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def lost(self) -> bool: ...
    def weight(
        self, offset: int, nbytes: int, format_id: int, experts: int, rows: int, columns: int, /
    ) -> PackedWeight: ...

def checksum(address: int, nbytes: int, /) -> int: ...
def layout_id(format_id: int, /) -> int: ...

# Operators over packed weights: bindings/products.cpp
class Linear:
    def __init__(self, weights: Sequence[PackedWeight], biases: Sequence[int], exact: bool, /) -> None: ...
    @property
    def columns(self) -> int: ...
    @property
    def width(self) -> int: ...
    def __call__(
        self, x: int, rows: int, x_stride: int, out: int, out_stride: int, residual: int, /
    ) -> None: ...

class HeadLinear:
    def __init__(self, weights: PackedWeight, exact: bool, /) -> None: ...
    def __call__(
        self,
        x: int,
        rows: int,
        x_row_stride: int,
        x_head_stride: int,
        out: int,
        out_row_stride: int,
        out_head_stride: int,
        /,
    ) -> None: ...

class Experts:
    def __init__(
        self,
        gate: PackedWeight,
        up: PackedWeight,
        down: PackedWeight,
        shared_gate: PackedWeight | None,
        shared_up: PackedWeight | None,
        shared_down: PackedWeight | None,
        act: int,
        limit: float,
        exact: bool,
        /,
    ) -> None: ...
    def __call__(
        self,
        x: int,
        tokens: int,
        ids: int,
        weights: int,
        k: int,
        shared_weights: int,
        out: int,
        residual: int,
        /,
    ) -> None: ...

# Rows of fp32: bindings/rows.cpp, bindings/attention.cpp. `isthmus.native.rows` says what they mean.
class PagedRows:
    def __init__(
        self,
        sequences: int,
        positions: int,
        slots: int,
        block_tables: int,
        num_rows: int,
        num_sequences: int,
        max_blocks: int,
        num_blocks: int,
    ) -> None: ...
    def move_to(self, rows: PagedRows) -> None: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def max_position(self) -> int: ...

class Rope:
    def __init__(self, cos: int, sin: int, positions: int, dims: int, style: int) -> None: ...

class RopeWrite:
    def __init__(
        self,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        rope: Rope,
        q_norm: int,
        k_norm: int,
        eps: float,
        cache_type: int,
    ) -> None: ...
    def __call__(self, qkv: int, stride: int, rows: PagedRows, k_cache: int, v_cache: int) -> None: ...

class LatentWrite:
    def __init__(
        self, heads: int, latent: int, rope: Rope, kv_norm: int, eps: float, cache_type: int
    ) -> None: ...
    def __call__(
        self,
        q: int,
        q_row_stride: int,
        q_head_stride: int,
        q_out: int,
        q_out_row_stride: int,
        q_out_head_stride: int,
        kv: int,
        kv_stride: int,
        rows: PagedRows,
        cache: int,
    ) -> None: ...

class Attention:
    def __init__(
        self,
        heads: int,
        kv_heads: int,
        qk_dim: int,
        v_dim: int,
        scale: float,
        cache_type: int,
        window: int,
        sinks: int,
        exact: bool,
    ) -> None: ...
    def paged(
        self, q: int, q_stride: int, rows: PagedRows, k_cache: int, v_cache: int, out: int, out_stride: int
    ) -> None: ...
    def latent(
        self, q: int, q_stride: int, rows: PagedRows, cache: int, out: int, out_stride: int
    ) -> None: ...
    def segment(
        self,
        q: int,
        q_stride: int,
        positions: int,
        num_rows: int,
        k: int,
        v: int,
        first_key: int,
        num_keys: int,
        carried: int,
        carry_in: bool,
        carry_out: bool,
        out: int,
        out_stride: int,
    ) -> None: ...

class Router:
    def __init__(
        self,
        experts: int,
        k: int,
        scoring: int,
        bias: int,
        groups: int,
        groups_kept: int,
        group_score: int,
        normalise: bool,
        scale: float,
    ) -> None: ...
    def __call__(self, logits: int, stride: int, num_rows: int, ids: int, weights: int) -> None: ...

def rms_norm(
    x: int, x_stride: int, num_rows: int, columns: int, weight: int, eps: float, out: int, out_stride: int
) -> None: ...
def act_mul(
    kind: int,
    limit: float,
    gate: int,
    gate_stride: int,
    up: int,
    up_stride: int,
    num_rows: int,
    columns: int,
    out: int,
    out_stride: int,
) -> None: ...
def axpy(w: float, x: int, n: int, y: int) -> None: ...
def read_rows(
    cache: int,
    cache_type: int,
    width: int,
    slots: int,
    num_rows: int,
    num_slots: int,
    out: int,
    out_stride: int,
) -> None: ...
def nucleus(weights: int, count: int, mass: float, ids: int) -> int: ...
def all_finite(logits: int, count: int) -> bool: ...
def topn(logits: int, count: int, n: int, values: int, ids: int) -> None: ...
