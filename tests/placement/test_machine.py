"""Machines drawn as a few small files: what a container's limits leave of them; and machines as JSON."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.config import ISA_NAMES
from isthmus.errors import UsageError
from isthmus.placement.machine import Machine
from isthmus.placement.nvidia import Gpu

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Four hardware threads on two cores, 64 GiB of which 48 are available, no limits."""
    files = {
        "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB",
        "proc/self/cgroup": "0::/a/b",
    }
    for cpu, core in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = core
    write(tmp_path, files)
    return tmp_path


def test_hyperthreads_are_not_cores(machine: Path) -> None:
    assert Machine.detect(machine, cpus={0, 1, 2, 3}).cores == 2
    assert Machine.detect(machine, cpus={0, 2}).cores == 1  # both on core 0


def test_without_limits_the_machine_is_what_it_has(machine: Path) -> None:
    found = Machine.detect(machine, cpus={0, 1})
    assert (found.total_bytes, found.available_bytes) == (64 * GIB, 48 * GIB)


def test_the_tightest_cgroup_above_counts_and_its_page_cache_is_free(machine: Path) -> None:
    write(
        machine,
        {
            "sys/fs/cgroup/a/memory.max": str(16 * GIB),  # the parent
            "sys/fs/cgroup/a/memory.current": str(10 * GIB),
            "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {4 * GIB}",
            "sys/fs/cgroup/a/b/memory.max": "max",
            "sys/fs/cgroup/a/b/memory.current": str(GIB),
        },
    )
    found = Machine.detect(machine, cpus={0, 1})
    assert (found.total_bytes, found.available_bytes) == (16 * GIB, 10 * GIB)  # 16 - 10 + 4


def test_a_cgroup_of_version_1(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/box",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(8 * GIB),
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),  # "no limit"
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(60 * GIB),
        },
    )
    assert Machine.detect(machine, cpus={0}).available_bytes == 6 * GIB


@pytest.mark.parametrize(("quota", "cores"), [("50000 100000", 1), ("150000 100000", 2), ("max 100000", 2)])
def test_a_cpu_quota_bounds_the_cores(machine: Path, quota: str, cores: int) -> None:
    write(machine, {"sys/fs/cgroup/a/b/cpu.max": quota})
    assert Machine.detect(machine, cpus={0, 1, 2, 3}).cores == cores


def test_this_machine() -> None:
    found = Machine.detect()
    assert found.cores >= 1
    assert 0 < found.available_bytes <= found.total_bytes
    assert found.threads >= found.cores
    assert found.sockets >= 1
    assert "scalar" in found.isa
    assert (found.gpus == ()) == bool(found.gpu_reason)


def test_sockets_threads_and_the_cpus_name_are_read(machine: Path) -> None:
    files = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id": str(cpu % 2) for cpu in range(4)
    }
    cpuinfo = "processor\t: 0\nmodel name\t: EPYC 9654 96-Core\nflags\t\t: fpu avx512_bf16 clzero"
    write(machine, {**files, "proc/cpuinfo": cpuinfo})
    found = Machine.detect(machine, cpus={0, 1, 2, 3})
    assert (found.sockets, found.threads, found.cpu) == (2, 4, "EPYC 9654 96-Core")
    assert found.avx512_bf16
    write(machine, {"proc/cpuinfo": cpuinfo.replace("avx512_bf16 ", "")})
    assert not Machine.detect(machine, cpus={0, 1, 2, 3}).avx512_bf16


CARD: dict[str, Any] = {
    "index": 0, "name": "RTX 4090", "total_bytes": "24GiB", "free_bytes": "23.5GiB",
    "compute_capability": "8.9",
}  # fmt: skip
FILE: dict[str, Any] = {"cores": 32, "total_bytes": "512GiB", "available_bytes": 500 * GIB, "gpus": [CARD]}


def test_a_machine_from_json_leaves_open_what_the_file_does() -> None:
    read = Machine.from_json(json.dumps(FILE))
    card = Gpu(0, "RTX 4090", 24 * GIB, 47 * GIB // 2, "8.9")
    assert read == Machine(32, 512 * GIB, 500 * GIB, gpus=(card,))
    assert (read.read_gb_s, card.memory_gb_s, card.link_gb_s) == (0, 0, 0)


def test_a_file_says_true_or_false_of_a_cpus_flag() -> None:
    assert Machine.from_json(json.dumps(FILE | {"avx512_bf16": True})).avx512_bf16
    with pytest.raises(UsageError, match="avx512_bf16 must be true or false, got 1"):
        Machine.from_json(json.dumps(FILE | {"avx512_bf16": 1}))


@given(
    st.builds(
        Machine,
        cores=st.integers(1, 256),
        total_bytes=st.just(64 * GIB),
        available_bytes=st.integers(0, 64 * GIB),
        isa=st.lists(st.sampled_from(["scalar", "avx2", "amx"]), unique=True).map(
            lambda names: tuple(sorted(names, key=ISA_NAMES.index))
        ),
        read_gb_s=st.floats(0, 1e3),
        cpu=st.text(max_size=20),
        gpus=st.lists(
            st.builds(
                Gpu,
                index=st.just(0),
                name=st.text(max_size=20),
                total_bytes=st.just(24 * GIB),
                free_bytes=st.integers(0, 24 * GIB),
                compute_capability=st.sampled_from(["8.0", "12.0"]),
                memory_gb_s=st.floats(0, 1e4),
            ),
            max_size=3,
        ).map(lambda cards: tuple(replace(card, index=i) for i, card in enumerate(cards))),
    )
)
def test_a_machine_survives_json(machine: Machine) -> None:
    assert Machine.from_json(machine.to_json()) == machine


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"coers": 3}, "m.json: unknown key 'coers'; there may be cores, total_bytes"),
        ({"cores": "many"}, "m.json: cores must be a whole number, got 'many'"),
        ({"cores": 0}, "m.json: cores must be from 1 to 16384, got 0"),
        ({"cores": True}, "m.json: cores must be a whole number, got True"),
        ({"cores": 2.5}, "m.json: cores must be a whole number, got 2.5"),
        ({"read_gb_s": -1}, "m.json: read_gb_s must be from 0 to 100000, got -1"),
        ({"read_gb_s": float("nan")}, "m.json: read_gb_s must be a number, got nan"),
        ({"total_bytes": "512 gigs"}, "m.json: total_bytes must be a size such as 20GiB"),
        ({"total_bytes": 1 << 60}, "m.json: total_bytes must be from 1 to"),
        ({"available_bytes": "513GiB"}, "available_bytes is more than total_bytes"),
        ({"isa": "amx"}, "m.json: isa must be a list, got 'amx'"),
        ({"isa": ["avx2", "sse9"]}, "m.json: isa must be one of scalar, avx2, .*, got 'sse9'"),
        ({"gpus": {}}, "m.json: gpus must be a list, got {}"),
        ({"gpus": [3]}, r"m.json: gpus\[0\] must be an object, got 3"),
        ({"gpus": [CARD, CARD]}, "gpus must have the indices 0, 1"),
        ({"gpus": [CARD | {"vram": 1}]}, r"unknown key 'vram'; in gpus\[0\] may be index, name"),
        (
            {"gpus": [CARD | {"compute_capability": "ada"}]},
            r"gpus\[0\].compute_capability must be as 8.9, got 'ada'",
        ),
        (
            {"gpus": [CARD | {"compute_capability": 8.9}]},
            r"gpus\[0\].compute_capability must be as 8.9, got 8.9",
        ),
        ({"gpus": [CARD | {"free_bytes": "25GiB"}]}, r"gpus\[0\].free_bytes is more than its total_bytes"),
        ({"gpus": [{"index": 0}]}, r"m.json: gpus\[0\].name is missing"),
    ],
)
def test_a_malformed_machine_file_is_an_error_that_names_the_key(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Machine.from_json(json.dumps(FILE | change), source="m.json")


def test_instruction_sets_may_be_named_in_any_order() -> None:
    assert Machine.from_json(json.dumps(FILE | {"isa": ["amx", "avx2"]})).isa == ("avx2", "amx")


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "is no JSON"), ("[]", "the whole must be an object"), ('{"cores": 2}', "total_bytes is missing")],
)
def test_a_file_that_is_no_machine(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Machine.from_json(text)
