"""`isthmus list` and `isthmus rm`: the downloaded models, and what was made of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli import options
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from isthmus.weights.downloads import Downloads, LocalModel


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    debug: options.Debug = False,
) -> None:
    """List the models that are downloaded, with their packed caches and what has not come whole."""
    from isthmus.weights.downloads import Downloads

    options.configure_logging(debug)
    downloads = Downloads()
    models = [_described(local) for repo in downloads.repos() for local in downloads.models(repo)]
    partial = {repo: nbytes for repo in downloads.repos() if (nbytes := downloads.partial_bytes(repo))}
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode({"models": models, "partial": partial})).decode())
        return
    print("\n".join(_lines(downloads.root, models, partial)))


def remove(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="owner/repo:QUANT; owner/repo for all there is of it.")
    ],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    debug: options.Debug = False,
) -> None:
    """Delete a downloaded MODEL and its packed cache."""
    from isthmus.weights.downloads import Downloads
    from isthmus.weights.hub import RepoName

    options.configure_logging(debug)
    name = RepoName.parse(model)
    if name is None:
        raise UsageError(
            f"a downloaded model is owner/repo or owner/repo:QUANT, got {model!r}; see isthmus list"
        )
    downloads = Downloads()
    found = downloads.models(name.repo)
    if name.quant:
        one = downloads.find(name)
        found = [one] if one else []
    partial = 0 if name.quant else downloads.partial_bytes(name.repo)
    if not found and not partial:
        raise UsageError(f"{model} is not here{_near(downloads, name.repo)}; see isthmus list")
    what = ", ".join(str(local) for local in found) or f"what has come of {name.repo}"
    total = partial + sum(local.model.nbytes + _packed_bytes(local) for local in found)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"delete {what}? Nobody is there to answer: say -y")
        typer.confirm(f"delete {what} ({total / 1e9:.2f} GB)?", default=False, abort=True, err=True)
    freed = sum(_remove(downloads, local) for local in found)
    freed += downloads.remove_partials(name.repo) if partial else 0
    print(f"deleted {what}: {freed / 1e9:.2f} GB")


def _described(local: LocalModel) -> dict[str, Any]:
    return {
        "name": str(local),
        "bytes": local.model.nbytes,
        "files": len(local.model.files),
        "packed_bytes": _packed_bytes(local),
        "path": str(local.path),
    }


def _lines(root: Path, models: list[dict[str, Any]], partial: dict[str, int]) -> Iterator[str]:
    from isthmus.placement.show_report import table

    if not models and not partial:
        yield f"no models in {root}; isthmus pull owner/repo:QUANT downloads one"
    if models:
        rows = [("model", "GB", "files", "packed GB")]
        for one in models:
            packed = f"{one['packed_bytes'] / 1e9:.2f}" if one["packed_bytes"] else "-"
            rows.append((one["name"], f"{one['bytes'] / 1e9:.2f}", str(one["files"]), packed))
        yield from table(rows, left=(0,))
    for repo, nbytes in partial.items():
        yield (
            f"{repo}: {nbytes / 1e9:.2f} GB of a download that has not ended; isthmus pull goes on with it, "
            f"isthmus rm {repo} deletes it"
        )


def _packed(local: LocalModel) -> list[Path]:
    """The cache, its stamp and its lock."""
    from isthmus.weights.packed_path import cache_path

    path = cache_path(local.path)
    return [p for p in path.parent.glob(path.name + "*") if p.is_file()] if path.parent.is_dir() else []


def _packed_bytes(local: LocalModel) -> int:
    return sum(path.stat().st_size for path in _packed(local))


def _remove(downloads: Downloads, local: LocalModel) -> int:
    freed = _packed_bytes(local)
    for path in _packed(local):
        path.unlink()
    return freed + downloads.remove(local)


def _near(downloads: Downloads, repo: str) -> str:
    import difflib

    near = difflib.get_close_matches(repo, downloads.repos(), n=3, cutoff=0.5)
    return f" (did you mean {', '.join(near)}?)" if near else ""
