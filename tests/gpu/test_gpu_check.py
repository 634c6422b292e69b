"""The script for a machine with a GPU, on one without: its checks in the interpreter, at tiny shapes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benches" / "gpu_check.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


def test_every_check_runs_and_a_wrong_kernel_fails_it(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but one kernel as they are; the one is off by an eighth."""
    right = script.activation.act_mul
    monkeypatch.setattr(script.activation, "act_mul", lambda *args: right(*args) * 1.125)
    facts = tmp_path / "facts.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--quick", "--device", "cpu", "--json", str(facts)])
    assert script.main() == 1
    assert "16 of 17 checks passed; wrong: silu * up" in capsys.readouterr().out
    lines = json.loads(facts.read_text())["lines"]
    assert [line["what"] for line in lines if line["error"] > line["tolerance"]] == ["silu * up"]
    assert len(lines) == 17


def test_not_a_number_is_wrong(script: Any) -> None:
    assert script.Line("x", float("nan"), 1.0).wrong
    assert not script.Line("x", 0.5, 1.0).wrong


def test_without_cuda_it_says_so(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert script.main() == 2
    assert "finds no CUDA device" in capsys.readouterr().out
