"""The script for a machine with a GPU, on one without: tiny shapes, kernels in the interpreter."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.gpu import reference
from isthmus.gpu.tiles import GPU_FORMATS

BENCHES = Path(__file__).parents[2] / "benches"
TINY = ("--quick", "--device", "cpu")

PARTS = """
import os, sys, time
from gpu_parts.lines import Line

def works(setting):
    yield Line("a figure", value=2.0, unit="tok/s")
    yield Line("a check", 0.5, 1.0)

def is_wrong(setting):
    yield Line("another", 2.0, 1.0)

def raises(setting):
    yield Line("begun", 0.0, 0.0)
    raise RuntimeError("the card is gone\\nand a second line")

def dies(setting):
    yield Line("begun", 0.0, 0.0)
    print("CUDA error: an illegal memory access", file=sys.stderr, flush=True)
    os.abort()

def hangs(setting):
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one that waits for a device hears none
    yield Line("begun", 0.0, 0.0)
    time.sleep(600)
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """With parts of our own, which its processes find."""
    (tmp_path / "odd_parts.py").write_text(PARTS)
    sources = str(BENCHES.parent / "src")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{sources}")
    monkeypatch.syspath_prepend(str(BENCHES))
    return importlib.import_module("gpu_check")


def odd(script: Any, monkeypatch: pytest.MonkeyPatch, *names: str, seconds: float = 60) -> None:
    parts = {name: script.Part(f"odd_parts:{name}", seconds) for name in names}
    monkeypatch.setattr(script, "PARTS", parts)


def run(script: Any, monkeypatch: pytest.MonkeyPatch, facts: Path, *words: str) -> tuple[int, Any]:
    """(exit code, its JSON)."""
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--json", str(facts), *words])
    code = script.main()
    return code, json.loads(facts.read_text())


def test_every_check_runs_and_a_wrong_kernel_fails_it(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but one kernel as they are; the one is off by an eighth."""
    from gpu_parts.child import lines_of
    from gpu_parts.lines import Setting
    from isthmus.gpu import activation

    right = activation.act_mul
    monkeypatch.setattr(activation, "act_mul", lambda *args: right(*args) * 1.125)
    lines = list(lines_of(script.PARTS["kernels"].where, Setting(torch.device("cpu"), True)))
    assert [line.what for line in lines if line.wrong] == ["silu * up"]
    assert len([line for line in lines if line.error is not None]) == len(lines) == 33


def test_a_kernel_that_does_not_compile_is_said_and_leaves_the_others(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of a compiler: where at first, then the text around it, what was wrong at last."""
    from gpu_parts import kernels
    from gpu_parts.lines import Setting

    class CompilationError(Exception):
        pass

    def fails(*_: Any, **__: Any) -> None:
        raise CompilationError("at 12:8:\n" + "    x = tl.load(q)\n" * 60 + "        ^\nq must be a pointer")

    for others in ("weights", "experts", "fp8", "fixed"):  # which take their time
        monkeypatch.setattr(kernels, f"check_{others}", lambda *_: iter(()))
    monkeypatch.setattr(kernels.router, "route", fails)
    monkeypatch.setattr(kernels.decode, "mla_decode", fails)
    lines = list(kernels.kernels(Setting(torch.device("cpu"), True)))
    wrong = [line for line in lines if line.wrong]
    assert [line.what for line in wrong] == [
        "router broke off",
        "MLA over bf16 broke off",
        "MLA over q8_0 broke off",
    ]
    for line in wrong:
        assert line.note.startswith("CompilationError: at 12:8:; x = tl.load(q); ")
        assert line.note.endswith("; ^; q must be a pointer")
        assert len(line.note) < 600
    assert {"rms norm", "rope and cache", "GQA decode over q8_0"} <= {line.what for line in lines}


def test_a_kernel_that_cannot_be_compiled_ahead_is_said_by_name(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_parts import ahead

    class Kernel:
        def __init__(self, name: str, error: str = "") -> None:
            self.fn, self._error = type(name, (), {}), error

        def warmup(self, *_: Any, **__: Any) -> None:
            if self._error:
                raise RuntimeError(self._error)

    work = [(Kernel("_good"), (), {}, {}), (Kernel("_bad", "PTXAS error\nout of registers"), (), {}, {})]
    monkeypatch.setattr(ahead, "_WORK", work)
    assert ahead._compile(0) == ""
    assert ahead._compile(1) == "_bad RuntimeError: PTXAS error; out of registers"
    done = subprocess.CompletedProcess([], 0, "7\n_bad RuntimeError: PTXAS error; out of registers\n", "")
    monkeypatch.setattr(ahead.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    lines = list(ahead.ahead(script_setting()))
    assert (lines[0].value, lines[0].failed) == (7, False)
    assert lines[1].what == "_bad does not compile"
    assert lines[1].note == "RuntimeError: PTXAS error; out of registers"
    assert lines[1].wrong


def script_setting() -> Any:
    from gpu_parts.lines import Setting

    return Setting(torch.device("cuda:0"), False)


def test_what_fails_dies_or_hangs_leaves_the_others(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd(script, monkeypatch, "raises", "dies", "hangs", "works", seconds=15)
    monkeypatch.setattr(importlib.import_module("gpu_parts.child"), "KILL_S", 0.2)
    monkeypatch.setitem(script.PARTS, "hangs", script.Part("odd_parts:hangs", 6))
    code, said = run(script, monkeypatch, tmp_path / "facts.json", *TINY)
    assert code == 1
    what = {part: [line["what"] for line in lines] for part, lines in said["lines"].items()}
    assert what == {
        "raises": ["begun", "raises broke off"],
        "dies": ["begun", "dies broke off"],
        "hangs": ["begun"],
        "works": ["a figure", "a check"],
    }
    assert said["lines"]["raises"][1]["note"] == "RuntimeError: the card is gone; and a second line"
    assert said["lines"]["dies"][1]["note"] == "killed by SIGABRT: CUDA error: an illegal memory access"
    assert said["states"]["hangs"].startswith("stopped: its 6 s are over")
    assert said["states"]["works"].startswith("ended after")
    out = capsys.readouterr().out
    assert "raises       1 of   2 right  ended" in out
    assert "wrong: raises broke off; wrong: dies broke off" in out


def test_the_exit_code_says_what_is_to_be_done(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All well; wrong; not all in time, which a second run of the rest completes, in the same file."""
    odd(script, monkeypatch, "works")
    assert run(script, monkeypatch, tmp_path / "a.json", *TINY)[0] == 0
    odd(script, monkeypatch, "is_wrong", "works")
    assert run(script, monkeypatch, tmp_path / "b.json", *TINY)[0] == 1
    odd(script, monkeypatch, "works")
    code, said = run(script, monkeypatch, tmp_path / "c.json", *TINY, "--minutes", "0.01")
    assert code == 3
    assert said == {"lines": {"works": []}, "states": {"works": "left out: 0.01 minutes are over"}}
    code, said = run(script, monkeypatch, tmp_path / "c.json", *TINY, "--only", "works")
    assert code == 0
    assert len(said["lines"]["works"]) == 2
    assert "works        1 of   1 right  ended after" in capsys.readouterr().out


def test_a_file_that_is_something_else_is_left_alone(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for text in ("notes", "[1]", '{"lines": {}}'):
        (tmp_path / "notes.json").write_text(text)
        with pytest.raises(SystemExit, match=r"notes\.json is there and not of an earlier run"):
            run(script, monkeypatch, tmp_path / "notes.json", *TINY)
        assert (tmp_path / "notes.json").read_text() == text


def test_without_cuda_it_says_so_and_names_the_machine(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, said = run(script, monkeypatch, tmp_path / "facts.json", "--only", "facts")
    assert code == 2
    assert "there is no CUDA device; nothing was measured" in capsys.readouterr().out
    named = {line["what"]: line["note"] for line in said["lines"]["facts"]}
    assert named["torch"] == torch.__version__
    assert {"python", "isthmus", "CPU", "GPU"} <= set(named)


def test_what_a_machine_without_a_gpu_can_do_runs(script: Any) -> None:
    """All other parts, in this process."""
    from gpu_parts.child import lines_of
    from gpu_parts.lines import Setting

    lines = {
        name: list(lines_of(part.where, Setting(torch.device("cpu"), True)))
        for name, part in script.PARTS.items()
        if name not in ("facts", "kernels")
    }
    every = [line for of in lines.values() for line in of]
    assert not [line for line in every if line.wrong]
    assert {name for name, of in lines.items() if of} == {"steps", "exact", "qwen3", "deepseek"}
    alike = [line for line in lines["steps"] if "graph on = off" in line.what]
    assert len(alike) == 6  # two models, hybrid and gpu, and over a cache of q8_0
    differ = [line for line in lines["exact"] if "answers that differ" in line.what]
    assert len(differ) == 4  # two models, together and in chunks
    assert not [line for line in every if line.microseconds or line.gb_s or line.unit == "tok/s"]
    ran = [line.what for line in lines["deepseek"] if line.note == "runs; nothing was measured"]
    assert ran == [f"tiny-deepseek2 {strategy}" for strategy in ("hybrid", "cpu", "stream", "gpu")]


ALONE = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Missing())
import gpu_check
from gpu_parts.child import lines_of, setting_of
setting = setting_of("cpu", True)
for part in ("facts", "qwen3", "memops", "rates", "ring"):
    for line in lines_of(gpu_check.PARTS[part].where, setting):
        assert not line.wrong, line
        print(line)
"""


def test_it_needs_no_package_but_torch_and_numpy() -> None:
    """A machine with a GPU that is lent for minutes has those."""
    project = tomllib.loads((BENCHES.parent / "pyproject.toml").read_text())["project"]
    named = [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    names = {re.split(r"[^\w-]", one)[0].replace("-", "_") for one in named} - {"torch", "numpy", "triton"}
    environment = os.environ | {"PYTHONPATH": f"{BENCHES}:{BENCHES.parent / 'src'}", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", ALONE, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "tiny-qwen3moe hybrid" in done.stdout


def test_kernels_are_compiled_ahead_without_a_card(tmp_path: Path) -> None:
    """What is kept is found by its name when the same is launched: the second time nothing is made."""
    environment = os.environ | {"PYTHONPATH": f"{BENCHES}:{BENCHES.parent / 'src'}"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command, made = [sys.executable, "-m", "gpu_parts.ahead", "90", "2"], []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) == 2
        made.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")})
    assert len(made[0]) == 2
    assert made[0] == made[1]


def test_what_is_compiled_ahead_is_what_the_parts_run(script: Any) -> None:
    from gpu_parts import ahead, models, shapes, steps

    assert {job.model for job in ahead.jobs()} == {*shapes.TINY, *steps.REAL, models.QWEN3, models.DEEPSEEK}
    over_q8_0 = [job.model for job in ahead.jobs() if job.options.kv_dtype == "q8_0"]
    assert over_q8_0 == list(shapes.TINY)


def test_not_a_number_is_wrong(script: Any) -> None:
    from gpu_parts.lines import Line

    assert Line("x", float("nan"), 1.0).wrong
    assert not Line("x", 0.5, 1.0).wrong


def test_random_weights_of_every_format_are_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHES))
    make = importlib.import_module("gpu_parts.kernels").Maker(torch.device("cpu"))
    for name in GPU_FORMATS:
        values = reference.dequantise(make.weight(name, 32, 512))
        assert 0.1 < values.square().mean().sqrt() < 1, name
