"""`isthmus`: the list of commands, and the one place where an error becomes a line and an exit code.

Exit codes: 0 done, 1 an error of file, memory or engine, 2 a mistake in the command line, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, NoReturn

import typer

from isthmus import __version__
from isthmus.cli import bench, chat, doctor, inspect, local, pack, plan, profile, pull, run, serve
from isthmus.errors import IsthmusError

app = typer.Typer(
    name="isthmus",
    help="Mixture-of-Experts models on one workstation.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command()(run.run)
app.command()(chat.chat)
app.command()(serve.serve)
app.command()(bench.bench)
app.command()(pack.pack)
app.command()(profile.profile)
app.command()(plan.plan)
app.command()(inspect.inspect)
app.command()(doctor.doctor)
app.command()(pull.pull)
app.command("list")(local.list_models)
app.command("rm")(local.remove)


def _print_version(value: bool) -> None:
    if value:
        print(f"isthmus {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


def main() -> NoReturn:
    """Runs a command and exits. With --debug an error keeps its traceback."""
    _complete_standard_files()
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()  # what cannot be written is said here
    except KeyboardInterrupt:
        code = 130  # 128 + SIGINT, as shells have it
    except BrokenPipeError:  # the reader of our output has gone (`isthmus run ... | head`)
        code = 1
    except typer.TyperException as error:  # of the command line's own parsing
        message, context = error.format_message(), getattr(error, "ctx", None)
        if context and message and not message.endswith("?"):  # that is a suggestion already
            message = f"{message.rstrip('.')}; {context.command_path} --help shows what there is"
        code = _fail(message, error.exit_code)
    except typer.Abort:
        code = 130
    except IsthmusError as error:
        if "--debug" in sys.argv:
            raise
        code = _fail(str(error), error.exit_code)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        code = _fail(f"{_of_the_machine(error) or _our_fault(error)}; --debug shows where", 1)
    _write_out()
    sys.exit(code if isinstance(code, int) else 0)


def _complete_standard_files() -> None:
    """A closed one is /dev/null; what the terminal's encoding lacks is written as an escape, as on stderr."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _write_out() -> None:
    """What still cannot be written goes nowhere: Python would try once more at its end, and say so."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _of_the_machine(error: Exception) -> str:
    """A full disk, a folder that may not be read, a package that is gone; "" for anything else."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("isthmus"):
        return f"the Python package {error.name} is missing: install Isthmus again, or it alone"
    return ""


def _our_fault(error: Exception) -> str:
    return f"{type(error).__name__}: {error} (a fault of Isthmus)"


def _fail(message: str, code: int) -> int:
    """One line. Without a message the help has been printed instead (`isthmus` alone)."""
    if message:
        print("error: " + " ".join(message.split()), file=sys.stderr)
    return code
