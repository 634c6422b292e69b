"""`isthmus`: the list of commands, and the one place where an error becomes a line and an exit code.

Exit codes: 0 done, 1 an error of file, memory or engine, 2 a mistake in the command line, 130 interrupted.
"""

from __future__ import annotations

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
    try:
        code = app(standalone_mode=False)
    except KeyboardInterrupt:
        code = 130  # 128 + SIGINT, as shells have it
    except BrokenPipeError:  # the reader of our output has gone (`isthmus run ... | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except typer.TyperException as error:  # of the command line's own parsing
        code = _fail(error.format_message(), error.exit_code)
    except typer.Abort:
        code = 130
    except IsthmusError as error:
        if "--debug" in sys.argv:
            raise
        code = _fail(str(error), error.exit_code)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        code = _fail(f"{type(error).__name__}: {error} (a fault of Isthmus; --debug shows where)", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    """One line. Without a message the help has been printed instead (`isthmus` alone)."""
    if message:
        print("error: " + " ".join(message.split()), file=sys.stderr)
    return code
