"""Every kernel compiles for every card from Ampere to Blackwell, and fits its shared memory.

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

from isthmus import gpu

# Bytes of shared memory a program may use: CUDA C++ programming guide, technical specifications per compute
# capability. The consumer cards' (8.6, 8.9, 12.0) is the least.
SHARED_LIMITS = {86: 101376, 89: 101376, 120: 101376, 80: 166912, 90: 232448, 100: 232448}

Compiled = dict[tuple[str, str, int], int]  # (call, kernel, capability) -> bytes of shared memory


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET")
    command = [sys.executable, str(Path(__file__).with_name("calls.py")), json.dumps(list(SHARED_LIMITS))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {(call, kernel, capability): shared for call, kernel, capability, shared in lines}


@pytest.mark.parametrize("capability", SHARED_LIMITS)
def test_every_kernel_compiles_and_fits_the_card(compiled: Compiled, capability: int) -> None:
    here = {(call, kernel): shared for (call, kernel, c), shared in compiled.items() if c == capability}
    launched = set()
    for path in Path(gpu.__path__[0]).glob("*.py"):
        launched |= set(re.findall(r"\blaunch\(\s*(_\w+),", path.read_text()))
    assert len(launched) > 10
    assert {kernel for _, kernel in here} == launched
    too_large = {what: shared for what, shared in here.items() if shared > SHARED_LIMITS[capability]}
    assert not too_large


def test_attention_stages_keys_in_shared_memory(compiled: Compiled) -> None:
    """The sizes are real: a program of MLA holds at least its 32 keys of 576 values in bf16."""
    assert compiled["MLA decode", "_decode_split", 86] >= 32 * 576 * 2
