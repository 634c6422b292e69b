"""What benches heed and refuse before they measure: `benches/compare.py` says in one line what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHES = Path(__file__).parents[2] / "benches"


def compare(*arguments: object) -> str:
    """The last line of standard error of a call that must be refused."""
    command = [sys.executable, BENCHES / "compare.py", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert not done.stdout
    return done.stderr.splitlines()[-1]


def program(path: Path, prints: str) -> Path:
    path.write_text(f"#!/bin/sh\necho '{prints}'\n")
    path.chmod(0o755)
    return path


def test_nothing_to_compare_with() -> None:
    assert "give --llama-bench PATH, --kt PYTHON or both" in compare("demo")


@pytest.mark.parametrize(("what", "said"), [("gone", "No such file"), (".", "Permission denied")])
def test_a_path_that_is_no_program(tmp_path: Path, what: str, said: str) -> None:
    assert f"cannot be run: {said}" in compare("demo", "--llama-bench", tmp_path / what)
    assert f"cannot be run: {said}" in compare("--kt", tmp_path / what)


def test_another_program_two_of_a_kind_and_a_python_without_the_package(tmp_path: Path) -> None:
    other = program(tmp_path / "other", "usage: other [file]")
    assert f"{other} is no llama-bench" in compare("demo", "--llama-bench", other)
    twins = [program(tmp_path / name, "-n, --n-gen <n>") for name in "ab"]
    given = [word for twin in twins for word in ("--llama-bench", twin)]
    assert f"{twins[0]} and {twins[1]} are both llama.cpp" in compare("demo", *given)
    assert "cannot import kt_kernel: ModuleNotFoundError" in compare("--kt", sys.executable)


def test_counts_that_measure_nothing() -> None:
    assert "--rounds: must be at least 1, got 0" in compare("demo", "--kt", sys.executable, "--rounds", 0)


def test_instruction_set_and_threads_of_the_environment_count_without_a_model() -> None:
    program = "from common import setting; print(setting()['isa'], setting()['threads'])"
    environment = os.environ | {"ISTHMUS_ISA": "scalar", "ISTHMUS_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=BENCHES, env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["scalar", "3"], done.stderr


LOAD = """
import json, os, sys
from pathlib import Path
import load
load.STARTS = 1
limit = load.Limit("copy", "gb_s", lambda seconds: 0.5)
model, environment = Path(sys.argv[1]), dict(os.environ, ISTHMUS_CACHE=sys.argv[2])
print(json.dumps([load.start(model, environment, limit, 10**9), load.start(model, environment, limit)]))
"""


def test_starts_stand_beside_their_limit(alphabet_model: Path, tmp_path: Path) -> None:
    """As if it packed 1 GB, against a limit of 0.5 GB/s; then what it mapped of files, which is far less."""
    command = [sys.executable, "-c", LOAD, alphabet_model, tmp_path]
    done = subprocess.run(command, cwd=BENCHES, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    packed, mapped = json.loads(done.stdout)
    assert 1 / packed["gb_s"] == pytest.approx(packed["weights_s"], abs=6e-4)  # printed to the millisecond
    for line in (packed, mapped):
        assert line["copy_limit_gb_s"] == 0.5
        assert line["copy_share"] == pytest.approx(line["gb_s"] / 0.5, abs=0.011)
    assert mapped["gb_s"] < packed["gb_s"]
