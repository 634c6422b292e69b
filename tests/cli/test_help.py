"""Help and version come without the weight of the engine."""

import subprocess
import sys

import pytest

from cli.terminal import environment, isthmus
from isthmus import __version__


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
