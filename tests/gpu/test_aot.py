"""Every kernel compiles for every card from Ampere to Blackwell, fits its shared memory and its registers.

A kernel is either interpreted or compiled in a process, so a process of its own compiles.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.aot import Compiled
from isthmus import gpu

# Bytes of shared memory a program may use: CUDA C++ programming guide, technical specifications per compute
# capability. The consumer cards' (8.6, 8.9, 12.0) is the least. A multiprocessor has 1024 more for each.
SHARED_LIMITS = {86: 101376, 89: 101376, 120: 101376, 80: 166912, 90: 232448, 100: 232448}
RESERVED = 1024
REGISTERS = 65536  # of a multiprocessor

# Bytes of stack by call and capability. Here the compiler stops at 128 registers of 256 threads, with which
# two programs are on a processor, and keeps two values of each outside.
STACKS = {("MLA prefill", 100): 8, ("linear, q6_k, 8 rows", 86): 8}

Found = dict[tuple[str, int], list[Compiled]]  # by call and capability


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Found:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET")
    command = [sys.executable, str(Path(__file__).with_name("calls.py")), json.dumps(list(SHARED_LIMITS))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found: Found = {}
    for line in done.stdout.splitlines():
        call, fields = json.loads(line)
        found.setdefault((call, fields["capability"]), []).append(Compiled(**fields))
    return found


def of_card(compiled: Found, capability: int) -> list[tuple[str, Compiled]]:
    return [(call, one) for (call, c), those in compiled.items() if c == capability for one in those]


@pytest.mark.parametrize("capability", SHARED_LIMITS)
def test_every_kernel_compiles_and_fits_the_card(compiled: Found, capability: int) -> None:
    here = of_card(compiled, capability)
    launched = set()
    for path in Path(gpu.__path__[0]).glob("*.py"):
        launched |= set(re.findall(r"\blaunch\(\s*(_\w+),", path.read_text()))
    assert len(launched) > 10
    assert {one.name for _, one in here} == launched
    assert not [(call, one) for call, one in here if one.shared_bytes > SHARED_LIMITS[capability]]


@pytest.mark.parametrize("capability", SHARED_LIMITS)
def test_no_kernel_spills(compiled: Found, capability: int) -> None:
    """What registers do not hold goes to memory at every step."""
    here = of_card(compiled, capability)
    assert not [(call, one) for call, one in here if one.stack_bytes > STACKS.get((call, capability), 0)]
    assert all(16 <= one.registers <= 255 for _, one in here)  # the figures are real


@pytest.mark.parametrize("capability", SHARED_LIMITS)
@pytest.mark.parametrize("call", ["MLA decode over q8_0", "GQA decode over q8_0"])
def test_two_programs_that_unpack_keys_are_on_a_processor(
    compiled: Found, call: str, capability: int
) -> None:
    """While one waits for its codes, or at a barrier, the other multiplies."""
    split = next(one for one in compiled[call, capability] if one.name == "_decode_split")
    by_shared = (SHARED_LIMITS[capability] + RESERVED) // (split.shared_bytes + RESERVED)
    by_registers = REGISTERS // (32 * split.warps * -(-split.registers // 8) * 8)
    assert min(by_shared, by_registers) >= 2, split


def test_attention_stages_keys_in_shared_memory(compiled: Found) -> None:
    """The sizes are real: a program of MLA holds at least its 32 keys of 576 values in bf16."""
    assert max(one.shared_bytes for one in compiled["MLA decode", 86]) >= 32 * 576 * 2
