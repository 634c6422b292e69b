"""Machines drawn as a few small files under a root: which cpus the pool counts, where it puts its workers.

A core is the cpus that share it, named by the lowest; a place is (node, cpus that the worker is confined to).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.native import _native

CPU = "sys/devices/system/cpu/"
NODE = "sys/devices/system/node/"


def draw(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def siblings(*cores: str) -> dict[str, str]:
    """thread_siblings_list of every cpu of cores written as "0,4" or "2"."""
    return {f"{CPU}cpu{cpu}/topology/thread_siblings_list": core for core in cores for cpu in core.split(",")}


def read(root: Path, affinity: range | list[int]) -> _native.Topology:
    return _native.read_topology(str(root), list(affinity))


def ids(machine: _native.Topology) -> list[int]:
    return [cpu.id for cpu in machine.cpus]


@pytest.fixture
def smt(tmp_path: Path) -> Path:
    """Four cores with two threads each; the second threads are numbered 4 to 7."""
    return draw(tmp_path, siblings("0,4", "1,5", "2,6", "3,7"))


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two nodes of three cores with two threads each: cpus 0-2,6-8 and 3-5,9-11."""
    files = siblings("0,6", "1,7", "2,8", "3,9", "4,10", "5,11")
    files |= {f"{NODE}online": "0-1", f"{NODE}node0/cpulist": "0-2,6-8", f"{NODE}node1/cpulist": "3-5,9-11"}
    files[f"{NODE}node1/meminfo"] = "Node 1 MemTotal:       1024 kB\nNode 1 MemFree:  1 kB"
    return draw(tmp_path, files)


# --- which cpus, how many threads --------------------------------------------------------------------


def test_a_cores_second_thread_is_no_core(smt: Path) -> None:
    machine = read(smt, range(8))
    assert [(cpu.id, cpu.core) for cpu in machine.cpus][3:6] == [(3, 3), (4, 0), (5, 1)]
    assert (machine.num_cores, machine.default_threads) == (4, 4)


def test_a_cpuset_of_three_cpus(smt: Path) -> None:
    machine = read(smt, [1, 5, 6])  # both threads of core 1, and the second of core 2
    assert [(cpu.id, cpu.core) for cpu in machine.cpus] == [(1, 1), (5, 1), (6, 6)]
    assert machine.default_threads == 2


@pytest.mark.parametrize(
    ("file", "cgroup"),
    [
        ("sys/fs/cgroup/box/cpuset.cpus.effective", "0::/box"),
        ("sys/fs/cgroup/cpuset/box/cpuset.effective_cpus", "3:cpuset:/box\n0::/"),
        ("sys/fs/cgroup/cpuset/cpuset.cpus", "3:cpuset:/host/path/we/cannot/see"),
    ],
)
def test_a_cpuset_that_is_only_written_down(smt: Path, file: str, cgroup: str) -> None:
    draw(smt, {"proc/self/cgroup": cgroup, file: "0-2"})
    assert ids(read(smt, range(8))) == [0, 1, 2]
    draw(smt, {file: "90"})  # a list that leaves nothing is not about us
    assert len(ids(read(smt, range(8)))) == 8


def test_cpus_that_are_offline_are_not_used(smt: Path) -> None:
    draw(smt, {f"{CPU}online": "0-1,3,5,7"})
    machine = read(smt, range(8))
    assert ids(machine) == [0, 1, 3, 5, 7]
    assert machine.default_threads == 3


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 2),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 1),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 4),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/a",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "150000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/a",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        ({"proc/self/cgroup": "0::/../../b", "sys/fs/cgroup/cpu.max": "300000 100000"}, 3),
        ({"proc/self/cgroup": "not a line\n0::", "sys/fs/cgroup/cpu.max": "0 0"}, 4),
    ],
)
def test_a_quota_bounds_the_threads(smt: Path, files: dict[str, str], threads: int) -> None:
    assert read(draw(smt, files), range(8)).default_threads == threads


@pytest.mark.parametrize(
    "files",
    [
        {"sys/devices/cpu_core/cpus": "0-3", "sys/devices/cpu_atom/cpus": "4-5"},
        {f"{CPU}cpu{cpu}/cpu_capacity": "1024" if cpu < 4 else "600" for cpu in range(6)},
        {f"{CPU}cpu{cpu}/cpufreq/cpuinfo_max_freq": str(5_000_000 - cpu * 400_000) for cpu in range(6)},
    ],
)
def test_efficient_cores_come_after_fast_ones_and_before_second_threads(
    tmp_path: Path, files: dict[str, str]
) -> None:
    """Two fast cores with two threads (0,1 and 2,3) and two efficient ones (4 and 5)."""
    machine = read(draw(tmp_path, siblings("0,1", "2,3", "4", "5") | files), range(6))
    assert [cpu.id for cpu in machine.cpus if cpu.efficient] == [4, 5]
    assert machine.default_threads == 4
    assert _native.pool_layout(machine, 6, 0) == [(0, []), (0, [2]), (0, [4]), (0, [5]), (0, [1]), (0, [3])]


def test_missing_files_mean_a_simple_machine(tmp_path: Path) -> None:
    machine = read(tmp_path, [0, 1, 5])
    assert [(cpu.id, cpu.core, cpu.node, cpu.efficient) for cpu in machine.cpus] == [
        (0, 0, 0, False),
        (1, 1, 0, False),
        (5, 5, 0, False),
    ]
    assert (machine.quota, machine.default_threads) == (0, 3)
    assert ids(read(tmp_path, [])) == [0]


def test_this_machine() -> None:
    machine = _native.this_machine()
    assert 1 <= machine.default_threads <= machine.num_cores <= len(machine.cpus)


# --- where the workers stand -------------------------------------------------------------------------


def test_workers_of_two_sockets_are_pinned_to_cores_of_their_node(two_sockets: Path) -> None:
    machine = read(two_sockets, range(12))
    assert machine.nodes == [0, 1]
    node0 = [0, 1, 2, 6, 7, 8]  # the caller may be anywhere on its node
    assert _native.pool_layout(machine, 6, 0) == [
        (0, node0), (0, [1]), (0, [2]), (1, [3]), (1, [4]), (1, [5])
    ]  # fmt: skip
    assert _native.pool_layout(machine, 6, 2) == _native.pool_layout(machine, 6, 0)


def test_fewer_threads_than_cores_are_spread_and_left_free_on_their_node(two_sockets: Path) -> None:
    machine = read(two_sockets, range(12))
    node0, node1 = [0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]
    assert _native.pool_layout(machine, 3, 0) == [(0, node0), (0, node0), (1, node1)]
    assert _native.pool_layout(machine, 1, 0) == [(0, node0)]


def test_one_node_of_two_sockets_keeps_its_workers_together(two_sockets: Path) -> None:
    machine = read(two_sockets, range(12))
    node0 = [0, 1, 2, 6, 7, 8]
    assert _native.pool_layout(machine, 3, 1) == [(0, node0)] * 3


def test_uneven_nodes_get_threads_by_their_cores(two_sockets: Path) -> None:
    machine = read(two_sockets, [0, 1, 2, 3])  # a cpuset: three cores here, one there
    assert [node for node, _ in _native.pool_layout(machine, 4, 0)] == [0, 0, 0, 1]
    assert read(two_sockets, [3, 4]).nodes == [1]


def test_more_threads_than_cpus_share_the_cpus_of_their_node(two_sockets: Path) -> None:
    machine = read(two_sockets, range(12))
    places = _native.pool_layout(machine, 64, 0)
    assert [node for node, _ in places].count(0) in (32, 33)
    assert {tuple(cpus) for _, cpus in places} == {(0, 1, 2, 6, 7, 8), (3, 4, 5, 9, 10, 11)}


@pytest.mark.parametrize("nodes", [2, 3, 4])
@pytest.mark.parametrize("threads", [1, 2, 3, 5, 8])
def test_pretended_nodes_split_the_workers_and_bind_nothing(smt: Path, threads: int, nodes: int) -> None:
    places = _native.pool_layout(read(smt, range(8)), threads, nodes)
    sizes = [[node for node, _ in places].count(n) for n in range(min(nodes, threads))]
    assert sum(sizes) == threads
    assert max(sizes) - min(sizes) <= 1
    assert [cpus for _, cpus in places] == [
        cpus for _, cpus in _native.pool_layout(read(smt, range(8)), threads, 0)
    ]


def test_a_small_pool_and_one_under_a_quota_are_not_pinned(smt: Path) -> None:
    """Two such pools side by side would choose the same cpus."""
    machine = read(smt, range(8))
    assert _native.pool_layout(machine, 2, 0) == [(0, [])] * 2
    assert _native.pool_layout(machine, 3, 0) == [(0, []), (0, [1]), (0, [2])]
    draw(smt, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "300000 100000"})
    assert _native.pool_layout(read(smt, range(8)), 3, 0) == [(0, [])] * 3


def test_nobody_spins_where_threads_outnumber_cpus_or_the_quota(smt: Path) -> None:
    machine = read(smt, range(8))
    assert [_native.pool_may_spin(machine, n) for n in (1, 4, 8, 9, 64)] == [True, True, True, False, False]
    draw(smt, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"})
    limited = read(smt, range(8))
    assert [_native.pool_may_spin(limited, n) for n in (1, 2)] == [True, False]


def test_memory_of_a_node(two_sockets: Path) -> None:
    assert _native.node_bytes(str(two_sockets), 1) == 1 << 20
    assert _native.node_bytes(str(two_sockets), 0) == 0  # not said
