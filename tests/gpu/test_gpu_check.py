"""The script for a machine with a GPU, on one without: tiny shapes, kernels in the interpreter."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHES = Path(__file__).parents[2] / "benches"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHES))
    return importlib.import_module("gpu_check")


def run(script: Any, monkeypatch: pytest.MonkeyPatch, facts: Path, *words: str) -> tuple[int, list[Any]]:
    """(exit code, the lines of its JSON)."""
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--json", str(facts), *words])
    code = script.main()
    said = json.loads(facts.read_text())
    assert said["measured"] is False
    return code, said["lines"]


def test_every_check_runs_and_a_wrong_kernel_fails_it(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but one kernel as they are; the one is off by an eighth."""
    from isthmus.gpu import activation

    right = activation.act_mul
    monkeypatch.setattr(activation, "act_mul", lambda *args: right(*args) * 1.125)
    words = ("--quick", "--device", "cpu", "--only", "kernels")
    code, lines = run(script, monkeypatch, tmp_path / "facts.json", *words)
    assert code == 1
    assert "18 of 19 checks passed; wrong: silu * up" in capsys.readouterr().out
    assert [line["what"] for line in lines if line["error"] > line["tolerance"]] == ["silu * up"]
    assert len(lines) == 19


def test_without_cuda_it_says_so_and_runs_what_it_can(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it but the kernels, which the test above runs."""
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    others = [word for part in script.PARTS if part != "kernels" for word in ("--only", part)]
    code, lines = run(script, monkeypatch, tmp_path / "facts.json", *others)
    assert code == 2
    said = capsys.readouterr().out
    assert "finds no CUDA device; nothing is measured" in said
    assert "4 of 4 checks passed" in said
    assert {line["part"] for line in lines} == {"steps", "models"}
    exact = [line for line in lines if "graph on = off" in line["what"]]
    assert len(exact) == 4  # two models, hybrid and gpu
    assert all(line["error"] == 0 for line in exact)
    assert not [line for line in lines if line["microseconds"] or line["gb_s"] or line["unit"] == "tok/s"]
    ran = [line["what"] for line in lines if line["note"] == "runs; nothing was measured"]
    assert "tiny-deepseek2 hybrid" in ran


def test_a_part_that_breaks_leaves_the_others(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpu_parts import models, steps
    from gpu_parts.lines import Line

    def broken(setting: Any) -> Any:
        yield Line("begun")
        raise RuntimeError("the card is gone\nand a second line")

    monkeypatch.setattr(steps, "steps", broken)
    monkeypatch.setattr(models, "models", lambda setting: iter([Line("went on")]))
    words = ("--quick", "--device", "cpu", "--only", "steps", "--only", "models")
    code, lines = run(script, monkeypatch, tmp_path / "facts.json", *words)
    assert code == 1
    assert [line["what"] for line in lines] == ["begun", "steps broke off", "went on"]
    assert lines[1]["note"] == "RuntimeError: the card is gone"
    monkeypatch.setattr(script, "MINUTES", -1.0)
    code, lines = run(script, monkeypatch, tmp_path / "facts.json", *words)
    assert code == 1
    assert [line["what"] for line in lines] == ["steps left out", "models left out"]


def test_not_a_number_is_wrong(script: Any) -> None:
    from gpu_parts.lines import Line

    assert Line("x", float("nan"), 1.0).wrong
    assert not Line("x", 0.5, 1.0).wrong
