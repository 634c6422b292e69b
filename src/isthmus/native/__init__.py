"""The CPU core: packed weights, products over them, threads and instruction sets.

`ops` wraps what multiplies by weights, `rows` what works on rows of fp32 (norm, rope, attention, router),
`sampling` what chooses among logits.
Arrays cross as addresses and counts; nothing here knows torch.
"""

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
