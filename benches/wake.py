"""What waking a thread that sleeps costs: the limit of any hand-over between two that do.

python benches/wake.py

Two processes with a cpu each; one works, wakes the other and sleeps until it is woken by it (eventfd; a futex
wakes by the same path of the kernel). Python adds about a microsecond.
"""

from __future__ import annotations

import os
import time
from statistics import median

from common import report

ROUNDS = 300


def work(us: float) -> None:
    end = time.perf_counter() + us / 1e6
    while time.perf_counter() < end:
        pass


def wake_round_us(work_us: float) -> float:
    """Microseconds, median, from waking the other until it has woken us; both slept before."""
    allowed = os.sched_getaffinity(0)
    ours, others = min(allowed), max(allowed)
    there, back = os.eventfd(0), os.eventfd(0)
    child = os.fork()
    if child == 0:
        os.sched_setaffinity(0, {others})
        for _ in range(ROUNDS):
            os.eventfd_read(there)
            os.eventfd_write(back, 1)
        os._exit(0)
    os.sched_setaffinity(0, {ours})
    try:
        times = []
        for _ in range(ROUNDS):
            work(work_us)
            begin = time.perf_counter()
            os.eventfd_write(there, 1)
            os.eventfd_read(back)
            times.append(time.perf_counter() - begin)
    finally:
        os.sched_setaffinity(0, allowed)
        os.waitpid(child, 0)
        os.close(there)
        os.close(back)
    return median(times) * 1e6


if __name__ == "__main__":
    for us in (0, 100, 1000):
        report(bench="wake", work_us=us, wake_round_us=round(wake_round_us(us), 1), cpus=os.cpu_count())
