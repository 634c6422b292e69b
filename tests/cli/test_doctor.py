"""`isthmus doctor` on the machine of the tests, whatever it is."""

import json
import subprocess
import sys

from cli.terminal import environment
from isthmus.cli.doctor import examine, lines
from isthmus.doctor.finding import Finding, System
from isthmus.placement.machine import Machine


def test_it_needs_no_torch_and_answers_in_json() -> None:
    program = (
        "import sys\n"
        "from isthmus.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as done: code = done.code\n"
        "print('heavy', sorted({'torch', 'tokenizers', 'huggingface_hub'} & set(sys.modules)), code)\n"
    )
    command = [sys.executable, "-c", program, "doctor", "--no-measure", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
    text, _, last = done.stdout.rstrip().rpartition("\n")
    data = json.loads(text)
    problems = [finding for finding in data["findings"] if finding["level"] == "problem"]
    assert last == f"heavy [] {1 if problems else 0}"
    assert {finding["topic"] for finding in data["findings"]} >= {"cpu", "isa", "memory", "huge pages", "gpu"}


def test_a_model_that_does_not_fit_is_a_problem() -> None:
    small = Machine(2, 8 << 30, 8 << 30, isa=("scalar", "avx2"))
    findings = list(examine(System(), small, "qwen3-30b-a3b", measure=False))
    (model,) = [finding for finding in findings if finding.topic == "model"]
    assert (model.level, model.fix) == ("problem", "isthmus plan qwen3-30b-a3b")
    assert any("pages" in finding.topic and "of 2 MB" in finding.text for finding in findings)


def test_lines_show_level_topic_and_command() -> None:
    shown = list(lines([Finding("cpu", "ok", "fine"), Finding("swap", "advice", "full", "swapoff -a")]))
    assert [line.split() for line in shown] == [
        ["ok", "cpu", "fine"],
        ["advice", "swap", "full"],
        ["->", "swapoff", "-a"],
        ["0", "problems,", "1", "piece", "of", "advice"],
    ]
