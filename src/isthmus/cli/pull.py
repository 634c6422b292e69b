"""`isthmus pull MODEL`: what it will take and how fast it will be, then the download."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.cli import options
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from isthmus.weights.downloads import Downloads, LocalModel
    from isthmus.weights.hub import Hub, RepoModel, RepoName


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="owner/repo or owner/repo:QUANT.")],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    debug: options.Debug = False,
) -> None:
    """Download MODEL into huggingface-hub's cache; an interrupted download goes on where it ended."""
    from isthmus.weights.hub import RepoName

    options.configure_logging(debug)
    name = RepoName.parse(model)
    if name is None:
        raise UsageError(f"a model to download is owner/repo or owner/repo:QUANT, got {model!r}")
    print(pulled(name, yes=yes).path)


def pulled(name: RepoName, *, yes: bool) -> LocalModel:
    """The model, downloaded unless it is here. typer.Abort if the answer is no."""
    from isthmus.weights.downloads import Downloads
    from isthmus.weights.hub import Hub, choose_model

    downloads, hub = Downloads(), Hub()
    model = choose_model(hub.models(name.repo), name)
    need = downloads.need_bytes(name.repo, model)
    if need:
        downloads.check_room(need)
        _summary(hub, name.repo, model, need)
        if not yes:
            _ask(f"download {need / 1e9:.2f} GB to {downloads.root}?")
    return _download(downloads, hub, name.repo, model)


def offer(name: str) -> None:
    """On a terminal: downloads a repository's model that is meant and not here, if the answer is yes."""
    from isthmus.resolve import missing_model

    repo = missing_model(name) if sys.stdin.isatty() and sys.stderr.isatty() else None
    if repo is not None:
        pulled(repo, yes=False)


def _summary(hub: Hub, repo: str, model: RepoModel, need: int) -> None:
    """On stderr: the model, this machine, and how they get on."""
    from isthmus.cli.load import say
    from isthmus.config import RunOptions
    from isthmus.placement.describe import model_numbers
    from isthmus.placement.described import described_machine
    from isthmus.placement.parts import model_parts
    from isthmus.placement.report import best, every_strategy
    from isthmus.placement.show_report import machine_line, model_lines, strategy_lines
    from isthmus.weights.headers import remote_source

    source, checked, machine = remote_source(hub, repo, model), RunOptions(), described_machine()
    parts = model_parts(source, checked)
    plans = every_strategy(machine, source, checked, parts)
    numbers = model_numbers(f"{repo}:{model.quant}", source, parts)
    say(next(iter(model_lines(numbers))))
    say(machine_line(machine))
    for line in strategy_lines(plans, best(plans), numbers.context_tokens):
        say(line)
    count = len(model.files)
    rest = f", {need / 1e9:.2f} GB still to come" if need != model.nbytes else ""
    say(f"download: {count} file{'s' * (count > 1)}, {model.nbytes / 1e9:.2f} GB{rest}")


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise UsageError(f"{question} Nobody is there to answer: say -y")
    typer.confirm(question, default=True, abort=True, err=True)


def _download(downloads: Downloads, hub: Hub, repo: str, model: RepoModel) -> LocalModel:
    from isthmus.cli.load import bar, say

    done = 0
    with bar(f"{repo}:{model.quant}", "downloading") as progress:

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(done, model.nbytes)

        try:
            return downloads.pull(hub, repo, model, count)
        except KeyboardInterrupt:
            say(f"{done / 1e9:.2f} of {model.nbytes / 1e9:.2f} GB are here; the same command goes on")
            raise
