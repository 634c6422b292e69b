"""What README, docs and examples say is run, or at least looked up: commands, options, code, figures, links.

Code runs on a tiny model in the place of the one it names. Of commands, all are parsed as `isthmus` parses
them; those that plan run.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command

import isthmus.resolve
from cli.conftest import Here
from isthmus.cli.main import app
from isthmus.weights.shapes import SHAPES

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
TEXT = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
SCRIPTS = "\n".join(p.read_text() for folder in ("benches", "tests") for p in (ROOT / folder).rglob("*.py"))
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]

# Options of programs that are not ours.
OTHERS_OPTIONS = {"--cpunodebind": "numactl", "--tasks": "lm_eval", "--model": "lm_eval"}

FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")


def fences(text: str, language: str) -> list[str]:
    return [body for name, body in FENCED.findall(text) if name == language]


def command_lines(program: str) -> list[str]:
    """`program ...` in blocks of no language and in code within lines, without comments, each once."""
    found = []
    for text in TEXT.values():
        blocks = "\n".join(fences(text, "")).replace("\\\n", " ")
        candidates = [*blocks.splitlines(), *INLINE.findall(FENCED.sub("", text))]
        found += [re.split(r"\s#|\s&$", line)[0].strip() for line in candidates if line.startswith(program)]
    return sorted(set(found))


ISTHMUS_LINES = command_lines("isthmus ")
PYTHON = [(page, block) for page, text in TEXT.items() for block in fences(text, "python")]
PLANS = [line for line in ISTHMUS_LINES if line.startswith("isthmus plan ") and "--gpu" in line]


def test_there_is_something_to_hold() -> None:
    assert len(ISTHMUS_LINES) > 20
    assert len(PLANS) == 2
    assert len(PYTHON) == 3


@pytest.mark.parametrize("line", ISTHMUS_LINES)
def test_a_command_has_the_options_that_are_shown(line: str) -> None:
    _, name, *arguments = shlex.split(line.replace("[MODEL]", "MODEL"))
    try:
        COMMANDS[name].make_context(name, arguments)
    except typer.TyperException as error:
        if "Missing argument" not in error.format_message():  # the name of a command alone is no mistake
            raise


def test_every_option_that_is_named_exists() -> None:
    ours = {o for c in COMMANDS.values() for p in c.params for o in (*p.opts, *p.secondary_opts)}
    unknown = [
        f"{page}: {option}"
        for page, text in TEXT.items()
        for option in sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)))
        if option not in ours | OTHERS_OPTIONS.keys() and f'"{option}"' not in SCRIPTS
    ]
    assert not unknown


@pytest.mark.parametrize("line", command_lines("python "))
def test_a_script_has_the_options_that_are_shown(line: str) -> None:
    _, script, *arguments = line.replace("[", " ").replace("]", " ").split()
    source = (ROOT / script).read_text()
    for module in re.findall(r"^from (\w+) import", source, re.MULTILINE):
        beside = (ROOT / script).parent / f"{module}.py"
        source += beside.read_text() if beside.exists() else ""
    assert not [word for word in arguments if word.startswith("--") and f'"{word}"' not in source]


def test_targets_of_make_and_variables_of_the_environment_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {line.split()[1] for line in command_lines("make ")} <= targets
    read = (ROOT / "src/isthmus/config.py").read_text()
    named = {name for text in TEXT.values() for name in re.findall(r"ISTHMUS_[A-Z_]+", text)}
    assert {name for name in named if f'"{name}"' not in read} == set()


def test_links_and_paths_lead_somewhere() -> None:
    missing = []
    for page, text in TEXT.items():
        links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
        for link in links:
            file, _, anchor = link.partition("#")
            target = ((ROOT / page).parent / file) if file else ROOT / page
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                missing.append(f"{page}: {link}")
        for path in re.findall(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|h|cpp|def|md|png))`", text):
            places = [ROOT / path, ROOT / "src/isthmus" / path, ROOT / "csrc" / path]
            places += [ROOT / "src/isthmus/server" / path]  # docs/server.md speaks from there
            if "NAME" not in path and not any(place.exists() for place in places):
                missing.append(f"{page}: {path}")
    assert not missing


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("line", PLANS)
def test_a_plan_has_the_figures_that_the_page_gives_for_it(here: Here, line: str) -> None:
    done = here(*shlex.split(line)[1:])
    assert done.returncode == 0
    for figure in ("404.9 GB", "12.31 GB of it routed experts", "68.6 KiB a token"):
        assert figure in done.stdout


def test_the_worked_example_has_the_figures_of_its_plan(here: Here) -> None:
    line = fences(TEXT["docs/planning.md"].partition("## Worked example")[2], "")[0]
    rows = [row.split() for row in here(*shlex.split(line)[1:]).stdout.splitlines()]
    page = TEXT["docs/planning.md"].replace("**", "")
    for name, (low, high) in {"cpu": (66, 147), "stream": (27, 35), "hybrid": (88, 196)}.items():
        row = next(row for row in rows if row[:1] == [name])
        at = next(n for n, word in enumerate(row) if word.startswith("("))  # decode and its range
        ends = row[at].strip("()").replace("-", " to ")
        assert f"{row[at - 1]} ({ends})" in page
        prefill = next(n for n, word in enumerate(row) if word.startswith("(") and n > at)
        assert f"{float(row[prefill - 1]):.0f} ({low} to {high})" in page
        assert [round(float(end)) for end in row[prefill].strip("()").split("-")] == [low, high]


def test_every_shape_is_named_where_shapes_are_listed() -> None:
    for page in ("README.md", "docs/planning.md"):
        assert not [shape for shape in SHAPES if shape not in TEXT[page]], page


MACHINE = """{"cores": 32, "total_bytes": "512GiB", "available_bytes": "500GiB", "read_gb_s": 300,
 "gpus": [{"index": 0, "name": "RTX 4090", "total_bytes": "24GiB", "free_bytes": "23.5GiB",
           "compute_capability": "8.9", "pcie_generation": 4, "pcie_width": 16, "memory_gb_s": 1008}]}"""


@pytest.mark.parametrize("code", [pytest.param(block, id=page) for page, block in PYTHON])
def test_code_runs(
    code: str,
    alphabet_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(isthmus.resolve, "DEMO", "the demo's name")
    Path("demo").symlink_to(alphabet_model)
    Path("machine.json").write_text(MACHINE)
    exec(compile(code, "docs", "exec"), {"__name__": "docs"})
    printed = capsys.readouterr().out
    if "llm.chat(" in code:
        assert printed == "xyztuvwxyz stop\n"  # of alphabet.py's model: the turn's answer, and after "is"
    if "print(plan(" in code:
        assert "hybrid" in printed


def test_the_quickstart_answers(
    alphabet_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quickstart.py", str(alphabet_model)])
    runpy.run_path(str(ROOT / "examples/quickstart.py"), run_name="__main__")
    assert capsys.readouterr().out == "xyz\n"


def test_the_layer_of_the_examples_counts_what_crosses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 tokens of 7168 values in bf16 each way, and 8 ids and weights of 4 bytes; 8 experts of 24.8 MB."""
    monkeypatch.setattr(sys, "argv", ["heterogeneous_layer.py", "2", "8"])
    runpy.run_path(str(ROOT / "examples/heterogeneous_layer.py"), run_name="__main__")
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert printed["x_bytes"] == printed["y_bytes"] == "28,672"
    assert printed["routing_bytes"] == "128"
    assert printed["activation_transfer_bytes"] == "57,472"
    assert printed["naive_weight_transfer_bytes"] == "198,180,864"
