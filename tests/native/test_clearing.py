"""Where packing has the kernel clear a huge page from (clear_upwards of csrc/runtime/arena.h)."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from isthmus.formats.spec import by_name
from isthmus.native.ops import pack

PR_SET_THP_DISABLE = 41
HUGE, STRIP = 2 << 20, 64 << 10
STRIPS = 32 * (1 << 20) // STRIP + 1  # enough for a region of its own; of its last huge page one strip
LAST_PAGE = (STRIPS - 1) * STRIP  # where that page begins


def cpu_says(word: str) -> bool:
    return word in Path("/proc/cpuinfo").read_text()


def present(address: int) -> bool:
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        pages.seek(address // mmap.PAGESIZE * 8)
        return bool(pages.read(8)[7] & 0x80)


def main() -> None:
    """Without huge pages, so that it shows which small ones faulted."""
    assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    data = np.zeros(STRIPS * STRIP, np.uint8)
    packed = pack(data.data, by_name("f32").ggml_id, 1, STRIPS * 16, STRIP // 64)
    last = packed.address + LAST_PAGE
    assert last % HUGE == 0
    assert present(last), "the strip was written"
    assert not present(last + HUGE // 2), "nothing else was"
    assert present(last + HUGE - mmap.PAGESIZE), "the end of the huge page did not fault"


@pytest.mark.skipif(
    not (cpu_says("AuthenticAMD") or cpu_says("HygonGenuine")), reason="not done on other CPUs, unmeasured"
)
def test_a_huge_page_faults_at_its_end_first() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    main()
