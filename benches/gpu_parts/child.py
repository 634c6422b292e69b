"""A part of gpu_check as a process of its own: a fault of the device, a crash or a hang ends that alone."""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

from gpu_parts.lines import Line, Setting, apart

KILL_S = 3.0  # between asking a process to end and ending it
LAST_WORDS = 400  # characters of what a process that died said on stderr


@dataclass(frozen=True)
class Part:
    where: str  # module:function, which gives lines of a setting
    seconds: float  # that it may take


@dataclass(frozen=True)
class Ended:
    """The last thing a part gives. failed: it did not come to its end by itself, and not for want of time."""

    why: str
    failed: bool


def run_part(part: Part, command: list[str], seconds: float) -> Iterator[Line | Ended]:
    """The lines of `command --part .. --to ..` as they come."""
    reader, writer = os.pipe()
    begin = time.monotonic()
    with subprocess.Popen(
        [*command, "--part", part.where, "--to", str(writer)],
        pass_fds=[writer],
        stderr=subprocess.PIPE,
        start_new_session=True,  # its own children end with it
    ) as process:
        os.close(writer)
        said = process.stderr
        assert said is not None
        os.set_blocking(said.fileno(), False)
        text, words = b"", b""
        try:
            open_ends = [reader, said.fileno()]
            while reader in open_ends:
                left = begin + seconds - time.monotonic()
                if left <= 0:
                    yield Ended(f"stopped: its {seconds:.0f} s are over", failed=False)
                    return
                for ready in select.select(open_ends, [], [], left)[0]:
                    data = os.read(ready, 1 << 16)
                    if not data:
                        open_ends.remove(ready)
                    elif ready == reader:
                        *lines, text = (text + data).split(b"\n")
                        yield from (Line(**json.loads(line)) for line in lines)
                    else:
                        os.write(2, data)
                        words = (words + data)[-4 * LAST_WORDS :]
            code = process.wait(max(1.0, begin + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            yield Ended(f"stopped: its {seconds:.0f} s are over, its work was done", failed=False)
            return
        finally:
            os.close(reader)
            _end(process)
        if code == 0:
            yield Ended("ended", failed=False)
            return
        last = words.decode(errors="replace").strip().rpartition("\n")[2][-LAST_WORDS:]
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        yield Ended(f"{how}{': ' + last if last else ''}", failed=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started. A process that waits for a GPU may not hear a signal it can handle."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_S)


def serve(where: str, to: int, device: str, quick: bool) -> int:
    """In the part's process: its lines, one JSON object each, to the pipe `to`."""
    with os.fdopen(to, "w", buffering=1) as out:
        for line in lines_of(where, setting_of(device, quick)):
            print(json.dumps(asdict(line)), file=out, flush=True)
    return 0


def lines_of(where: str, setting: Setting) -> Iterator[Line]:
    """A part's lines; what breaks it is the last of them."""
    module, _, name = where.partition(":")

    def lines() -> Iterator[Line]:
        yield from getattr(importlib.import_module(module), name)(setting)

    yield from apart(name, lines())


def setting_of(device: str, quick: bool) -> Setting:
    """The CPU and tiny shapes where there is no GPU."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return Setting(torch.device(device), quick)
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
    return Setting(torch.device("cpu"), True)
