"""How `isthmus serve` begins: the engine's process first, and what a second's work needs beside it."""

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from harness import FAKE_ENGINE, wait_for
from serve_process import PATIENCE_S

from isthmus.config import RunOptions
from isthmus.engine.process import EngineProcess
from isthmus.engine.request import ModelInfo
from isthmus.errors import MalformedFileError
from isthmus.server.run import Runner
from isthmus.server.start import start


def engine_process(folder: Path, flags: str = "none") -> EngineProcess:
    command = [sys.executable, str(FAKE_ENGINE), str(folder / "log"), "-", flags]
    return EngineProcess(Path("fake.gguf"), RunOptions(), command=command)


def is_there(pid: int | None) -> bool:
    """Whether a process, a dead one that nobody has waited for too, has this number."""
    return Path(f"/proc/{pid}").exists()


def test_the_engine_loads_while_the_rest_is_made(tmp_path: Path) -> None:
    engine = engine_process(tmp_path)

    class Made(Runner):
        def __init__(self) -> None:
            wait_for(lambda: engine.state == "ready")  # for ever, were the engine started afterwards

        async def run(self, on_loaded: object) -> None:
            assert (engine.state, engine.loaded_bytes) == ("ready", (2, 2))
            engine.start()  # the application does so: once more is no second process
            await engine.close()

    asyncio.run(start(engine, Made, lambda info: None))
    assert (tmp_path / "log").read_text().splitlines() == ["loaded", "closed"]


@pytest.mark.parametrize("is_ready", [False, True])
def test_what_cannot_be_made_leaves_no_process(tmp_path: Path, is_ready: bool) -> None:
    engine = engine_process(tmp_path)
    heard: list[ModelInfo | None] = []

    def make() -> Runner:
        wait_for(lambda: engine.state == "ready" if is_ready else engine.pid)
        raise MalformedFileError("no vocabulary")

    with pytest.raises(MalformedFileError, match="no vocabulary"):
        asyncio.run(start(engine, make, heard.append))
    assert not is_there(engine.pid)
    assert (engine.state, heard) == ("closed", [])


def test_an_interrupt_meanwhile_leaves_no_process(tmp_path: Path) -> None:
    engine = engine_process(tmp_path)

    async def interrupted() -> None:
        def make() -> Runner:
            wait_for(lambda: engine.pid)
            loop.call_soon_threadsafe(task.cancel)
            wait_for(lambda: engine.state == "closed")
            raise AssertionError("nobody waits for this")

        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(start(engine, make, print))
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    assert not is_there(engine.pid)


def test_serve_starts_the_engine_before_it_reads_the_vocabulary(alphabet_model: Path) -> None:
    """The command itself, whose tokenizer says what processes it has by then, and fails."""
    program = textwrap.dedent("""
        import os, sys, time
        from pathlib import Path
        import isthmus.tokenizer.from_file as from_file
        from isthmus.cli.main import main
        from isthmus.errors import MalformedFileError

        def engines():
            tasks = Path("/proc/self/task").glob("*/children")
            pids = [int(pid) for task in tasks for pid in task.read_text().split()]
            commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
            return [pid for pid in pids if b"isthmus.engine.worker" in commands[pid]]

        def open_texts(path):
            until = time.monotonic() + 30.0
            while not engines() and time.monotonic() < until:
                time.sleep(0.01)
            print(*engines(), flush=True)
            raise MalformedFileError(f"{path}: no vocabulary")

        from_file.open_texts = open_texts
        main()
        """)
    done = subprocess.run(
        [sys.executable, "-c", program, "serve", str(alphabet_model), "--port", "0"],
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, f"error: {alphabet_model}: no vocabulary\n")
    (engine,) = done.stdout.split()
    assert not is_there(int(engine))
