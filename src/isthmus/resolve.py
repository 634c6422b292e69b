"""From what a user calls a model to the file to open: the one resolver, used by every command.

A name is `demo`, the path of a .gguf file (any shard of a split model), a folder that holds one model,
`owner/repo[:QUANT]` for a downloaded model, or `dummy:SHAPE`, which has no file.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import ModelFileError, UsageError
from isthmus.weights.gguf_shards import shard_name
from isthmus.weights.source import DUMMY, WeightSource, is_dummy, open_weights

if TYPE_CHECKING:
    from isthmus.weights.downloads import LocalModel
    from isthmus.weights.hub import RepoName

DEMO = "demo"
_LISTED = 6  # files that an error lists
_TAKEN = "give the path of a .gguf file, owner/repo:QUANT of the Hugging Face Hub, or 'demo'"


_OF_OLLAMA = re.compile(r"[a-z][\w.-]*:[\w.-]+")  # llama3:8b


def resolve_model(name: str, *, progress: Callable[[int, int], None] | None = None) -> Path:
    """The path to give to `open_weights`.

    progress: called with (bytes done, bytes in all) while the demo model is made. Raises UsageError for a
    name that cannot be meant, ModelFileError for a folder without exactly one model, or a demo that cannot be
    made.
    """
    if name == DEMO:
        from isthmus.weights.demo import demo_model  # numpy is needed for this alone

        return demo_model(progress)
    if is_dummy(Path(name)):
        from isthmus.weights.dummy import DummySpec

        DummySpec.parse(name)  # what is wrong with it is said now
        return Path(name)
    if not name or "\x00" in name:
        raise UsageError(f"a model cannot be called {name!r}; {_TAKEN}")
    path = Path(name).expanduser()
    try:
        exists = path.exists()
    except PermissionError:
        raise ModelFileError(f"{path}: cannot be opened: Permission denied") from None
    except OSError as error:  # longer than a name may be
        raise UsageError(f"a model cannot be called {name[:40]!r}...: {error.strerror}; {_TAKEN}") from None
    if path.is_dir():
        return _only_model(path)
    if exists:
        return path
    if (repo := repo_name(name)) is not None:
        local = downloaded(repo)
        if local is not None:
            return local.path
        raise UsageError(_not_downloaded(repo, path))
    raise UsageError(_not_found(name, path))


def repo_name(name: str) -> RepoName | None:
    """The repository that is meant; None for what is there as a file or folder, or cannot be one."""
    if "/" not in name or name.startswith((".", "/", "~")):
        return None
    from isthmus.weights.hub import RepoName

    repo = RepoName.parse(name)
    return None if repo is None or Path(name).exists() else repo


def downloaded(repo: RepoName) -> LocalModel | None:
    """UsageError if several models here may be meant."""
    from isthmus.weights.downloads import Downloads

    return Downloads().find(repo)


def missing_model(name: str) -> RepoName | None:
    """The repository's model that is meant and is not here yet."""
    repo = repo_name(name)
    return repo if repo is not None and downloaded(repo) is None else None


def open_headers(name: str, quant: str | None = None) -> WeightSource:
    """A model to plan with: what `resolve_model` takes, `owner/repo[:QUANT]`, or a bare built-in shape.

    quant: the one of a repository, of a shape (its usual one by default), or that a file is imagined in.
    Headers only: of a repository by range requests, unless the quantisation is downloaded. Raises UsageError
    for a name that cannot be meant, HubError for a repository that cannot be read, what `open_weights` does.
    """
    from isthmus.weights.headers import remote_source, requantised
    from isthmus.weights.hub import Hub, RepoName, choose_model
    from isthmus.weights.quants import check_quant
    from isthmus.weights.shapes import SHAPES, usual_quant

    if name in SHAPES:
        return open_weights(f"{DUMMY}{name}?quant={check_quant(quant or usual_quant(name))}")
    if (repo := repo_name(name)) is not None:
        if quant and repo.quant:
            raise UsageError(
                f"{name!r} names a quantisation and --quant {quant} another; leave one of them out"
            )
        asked = RepoName(repo.repo, repo.quant or quant or "")
        if asked.quant and (local := downloaded(asked)) is not None:
            return open_weights(local.path)
        hub = Hub()
        return remote_source(hub, repo.repo, choose_model(hub.models(repo.repo), asked))
    near = [] if is_dummy(name) else difflib.get_close_matches(name, SHAPES, n=3, cutoff=0.6)
    if near and not Path(name).exists():
        raise UsageError(f"no model and no built-in shape is called {name!r}; did you mean {_list(near)}?")
    wanted = check_quant(quant) if quant else None
    source = open_weights(resolve_model(name))
    return source if wanted is None else requantised(source, wanted)


def _only_model(folder: Path) -> Path:
    """The single model of a folder: one .gguf or one split set. Image encoders (mmproj-*) do not count."""
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ModelFileError(f"{folder}: the folder cannot be read: Permission denied")
    files = sorted(p for p in folder.glob("*.gguf") if p.is_file() and not p.name.startswith("mmproj"))
    models: dict[str, Path] = {}
    for file in files:
        shard = shard_name(file)
        models.setdefault(f"{shard[0]} of {shard[2]}" if shard else file.name, file)
    if len(models) == 1:
        return files[0]
    if models:
        names = _list(path.name for path in models.values())
        raise ModelFileError(f"{folder}: holds {len(models)} models, give the path of one of them: {names}")
    text = f"{folder}: holds no .gguf file"
    if any(folder.glob("*.safetensors")):
        text += ", only safetensors; take the model in GGUF format"
    raise ModelFileError(text)


def _not_downloaded(repo: RepoName, path: Path) -> str:
    text = f"{repo} is not downloaded: isthmus pull {repo} does that"
    if path.parent.is_dir():  # a path that is not there looks the same
        here = [str(path.parent / p.name) for p in path.parent.iterdir() if p.suffix == ".gguf" or p.is_dir()]
        near = difflib.get_close_matches(str(path), here, n=3, cutoff=0.6)
        text += f"; if a file is meant: {_list(near)}" if near else ""
    return text


def _not_found(name: str, path: Path) -> str:
    from isthmus.weights.shapes import SHAPES

    if name in SHAPES:
        return (
            f"{name} is a shape without weights: isthmus plan {name} says what it takes, "
            f"{DUMMY}{name}?layers=2 runs a part of it with random ones; for its own give the path of a "
            ".gguf file, or owner/repo:QUANT of the Hugging Face Hub"
        )
    if "://" in name:
        return (
            f"no model at {name!r}: only repositories of the Hugging Face Hub are downloaded; fetch the "
            ".gguf file and give its path, or give owner/repo:QUANT"
        )
    folder = path.parent
    if not folder.is_dir():
        text = f"no model called {name!r}: the folder {str(folder)!r} does not exist"
        return f"{text}; {_TAKEN}"
    here = sorted(p.name for p in folder.iterdir() if p.suffix == ".gguf" or p.is_dir())
    near = difflib.get_close_matches(path.name, [*here, DEMO], n=3, cutoff=0.6)
    if near:
        found = (n if n == DEMO and n not in here else str(folder / n) for n in near)
        return f"no model called {name!r}; did you mean {_list(found)}?"
    if _OF_OLLAMA.fullmatch(name):
        return f"no model called {name!r}: Ollama's library is not read here; {_TAKEN}"
    return f"no model called {name!r}; {_TAKEN}"


def _list(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return ", ".join(known[:_LISTED]) + more
