"""The CPU core: packed weights, products over them, threads and instruction sets.

`ops` wraps what multiplies by weights, `rows` what works on rows of fp32 (norm, rope, attention, router),
`sampling` what chooses among logits.
Arrays cross as addresses and counts; nothing here knows torch.
"""

import importlib
import sys
from pathlib import Path

from isthmus.errors import IsthmusError

try:
    importlib.import_module(f"{__name__}._native")
except ImportError as error:
    _folder = Path(__file__).parent
    _built = ", ".join(sorted(path.name for path in _folder.glob("_native*.so"))) or "none"
    raise IsthmusError(
        f"the native extension cannot be loaded ({error}): {_folder} holds {_built}, and this is Python "
        f"{sys.version_info.major}.{sys.version_info.minor}; install Isthmus again with it (pip install .)"
    ) from error

from isthmus.native.ops import (
    Act,
    Experts,
    HeadLinear,
    Linear,
    PackedWeight,
    ReadProbe,
    Topology,
    current_isa,
    expert_reads,
    isa_names,
    multiply_gops,
    node_bytes,
    num_nodes,
    num_threads,
    pack,
    read_gb_s,
    set_threads,
    this_machine,
    use_isa,
)
from isthmus.native.program import PRODUCTS, Program, keep_op_log, op_seconds

__all__ = [
    "PRODUCTS",
    "Act",
    "Experts",
    "HeadLinear",
    "Linear",
    "PackedWeight",
    "Program",
    "ReadProbe",
    "Topology",
    "current_isa",
    "expert_reads",
    "isa_names",
    "keep_op_log",
    "multiply_gops",
    "node_bytes",
    "num_nodes",
    "num_threads",
    "op_seconds",
    "pack",
    "read_gb_s",
    "set_threads",
    "this_machine",
    "use_isa",
]
