"""Help and version come without the weight of the engine."""

import subprocess
import sys
from dataclasses import fields

import pytest
from typer.main import get_command

from cli.terminal import environment, isthmus
from isthmus import __version__
from isthmus.cli.main import app
from isthmus.cli.options import RUN_OPTIONS
from isthmus.config import DEFAULT_PARALLEL, RunOptions


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["bench", "--help"], ["--version"]])
def test_help_imports_neither_torch_nor_the_engine(arguments: list[str]) -> None:
    """A cause, not a time: torch alone takes seconds to import."""
    program = (
        "import sys\n"
        "from isthmus.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as done: code = done.code\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'isthmus.engine.engine', 'isthmus.native._native'}\n"
        "print('code', code, 'heavy', sorted(heavy & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.splitlines()[-1] == "code 0 heavy []"


def test_version() -> None:
    assert isthmus("--version").stdout == f"isthmus {__version__}\n"


def test_help_names_the_options_of_run() -> None:
    help_text = isthmus("run", "--help").stdout
    for option in (
        "--temperature",
        "--seed",
        "--max-tokens",
        "--ctx",
        "--threads",
        "--system",
        "--raw",
        "--isa",
    ):
        assert option in help_text


# Options of a run that a command does not have, and defaults of its own.
WITHOUT = {"bench": {"context_tokens", "parallel", "speculate"}}
OWN_DEFAULTS = {"serve": {"parallel": DEFAULT_PARALLEL}}


@pytest.mark.parametrize("command", ["run", "serve", "bench"])
def test_every_option_of_a_run_is_on_the_command_line(command: str) -> None:
    """A field of RunOptions is offered once in cli/options.py, and so by each command."""
    only_in_the_environment = {"fake_numa"}  # for tests
    defaults = {field.name: field.default for field in fields(RunOptions)}
    assert set(RUN_OPTIONS) == defaults.keys() - only_in_the_environment
    offered = {parameter.name: parameter for parameter in get_command(app).commands[command].params}
    names = RUN_OPTIONS.keys() - WITHOUT.get(command, set())
    assert offered.keys() & RUN_OPTIONS.keys() == names
    wanted = defaults | OWN_DEFAULTS.get(command, {})
    assert {name: offered[name].default for name in names} == {name: wanted[name] for name in names}
