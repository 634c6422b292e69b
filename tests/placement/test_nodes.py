"""The choice between one NUMA node and all, with drawn machines and given rates."""

from pathlib import Path

import pytest

from isthmus import native
from isthmus.native import _native
from isthmus.placement.nodes import NodeChoice, choose_nodes, read_rate

GB = 10**9


def two_sockets(root: Path, cores_each: int) -> native.Topology:
    """Cores 0.. on node 0, the others on node 1; no second threads."""
    node = root / "sys/devices/system/node"
    for index in (0, 1):
        (node / f"node{index}").mkdir(parents=True)
        first = index * cores_each
        (node / f"node{index}/cpulist").write_text(f"{first}-{first + cores_each - 1}\n")
    (node / "online").write_text("0-1\n")
    return _native.read_topology(str(root), range(2 * cores_each))


def never(threads: int, nodes: int) -> float:
    pytest.fail("there was nothing to measure")


def test_the_faster_one_is_taken_and_said(tmp_path: Path) -> None:
    machine = two_sockets(tmp_path, 4)
    tried: list[tuple[int, int]] = []

    def rates(one: float, both: float):  # type: ignore[no-untyped-def]
        def rate(threads: int, nodes: int) -> float:
            tried.append((threads, nodes))
            return one if nodes == 1 else both

        return rate

    assert choose_nodes(machine, None, GB, 64 * GB, rates(100, 180)) == NodeChoice(
        2, 8, "one node reads 100 GB/s, all 180"
    )
    assert choose_nodes(machine, None, GB, 64 * GB, rates(100, 90)) == NodeChoice(
        1, 4, "one node reads 100 GB/s, all 90"
    )
    assert choose_nodes(machine, 3, GB, 64 * GB, rates(100, 105)).nodes == 1  # not worth a second node
    assert tried == [(4, 1), (8, 2), (4, 1), (8, 2), (3, 1), (3, 2)]


def test_one_node_is_no_choice_where_threads_or_weights_do_not_fit(tmp_path: Path) -> None:
    machine = two_sockets(tmp_path, 4)
    assert choose_nodes(machine, 6, GB, 64 * GB, never) == NodeChoice(2, 6)
    assert choose_nodes(machine, None, 60 * GB, 64 * GB, never) == NodeChoice(2, 8)
    assert choose_nodes(machine, 1, GB, 64 * GB, never).threads == 1


def test_a_machine_of_one_node_measures_nothing(tmp_path: Path) -> None:
    machine = _native.read_topology(str(tmp_path), range(4))
    assert choose_nodes(machine, None, GB, 0, never) == NodeChoice(1, 4)
    assert choose_nodes(machine, 9, GB, 0, never) == NodeChoice(1, 9)


def test_the_rate_is_measured_with_the_threads_and_nodes_in_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.placement.nodes.BUFFER_BYTES", 48 << 20)
    monkeypatch.setattr("isthmus.placement.nodes.SECONDS", 0.01)
    before = native.num_threads()
    try:
        assert 0.1 < read_rate(3, 2) < 10_000
        assert (native.num_threads(), native.num_nodes()) == (3, 2)
    finally:
        native.set_threads(before)
