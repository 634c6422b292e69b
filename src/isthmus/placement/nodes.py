"""One NUMA node or all of them: a short measurement decides, where there is more than one.

All nodes have more cores and more memory to read from, but every job then waits for its slowest part across
the sockets' link; with few cores a node, a slow link or a neighbour's load on one of them, one node alone can
be faster. Nobody knows which from the topology, so both are tried for a moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from isthmus import native
from isthmus.native import Topology

# Read by each try: jobs of 16 MiB, about what one layer of a large model multiplies by between two barriers,
# from a buffer beyond the caches, for as long as a measurement needs to repeat within a few percent.
JOB_BYTES = 16 << 20
BUFFER_BYTES = 1 << 30
SECONDS = 0.1

# All nodes must be faster by this much: half of their memory is another process's as well as ours.
WORTH_IT = 1.1


@dataclass(frozen=True)
class NodeChoice:
    nodes: int
    threads: int
    reason: str = ""  # for the user; empty where there was nothing to decide


def choose_nodes(
    machine: Topology,
    threads: int | None,
    weight_bytes: int,
    node_bytes: int,
    rate: Callable[[int, int], float],
) -> NodeChoice:
    """Threads and nodes to run with.

    threads: as asked for, None: one per core. node_bytes: memory of the first node, 0: not known.
    rate(threads, nodes): GB/s that so many threads read from memory of their own nodes. One node is no choice
    where its cores are fewer than the threads asked for, or the weights do not fit into its memory.
    """
    all_nodes = machine.nodes
    everywhere = NodeChoice(len(all_nodes), threads or machine.default_threads)
    if len(all_nodes) == 1 or everywhere.threads == 1:
        return everywhere
    cores = sum(cpu.node == all_nodes[0] and cpu.core == cpu.id for cpu in machine.cpus)
    fits = weight_bytes < 0.9 * node_bytes or node_bytes == 0
    if (threads or 1) > cores or not fits:
        return everywhere
    alone = NodeChoice(1, min(everywhere.threads, cores))
    one, all_ = rate(alone.threads, 1), rate(everywhere.threads, len(all_nodes))
    chosen = everywhere if all_ > WORTH_IT * one else alone
    return NodeChoice(chosen.nodes, chosen.threads, f"one node reads {one:.0f} GB/s, all {all_:.0f}")


def read_rate(threads: int, nodes: int) -> float:
    """GB/s of reading with the pool's barriers in between. Sets the pool's threads and leaves them so."""
    native.set_threads(threads, nodes)
    return native.ReadProbe(BUFFER_BYTES, JOB_BYTES).run(SECONDS)
