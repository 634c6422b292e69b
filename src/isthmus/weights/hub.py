"""Models in repositories of the Hugging Face Hub: `owner/repo[:QUANT]` to the files that are meant.

A repository holds the same model in several quantisations, each one file or a set of shards, recognised by
their names as llama.cpp's -hf does. Everything goes through huggingface-hub, which knows endpoint
(HF_ENDPOINT), token (HF_TOKEN, `hf auth login`), proxies and retries; its errors become HubError, one line
each. Knows names and sizes, nothing of what is in the files.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from isthmus.errors import HubError, IsthmusError, UsageError
from isthmus.weights.cursor import ReadAt
from isthmus.weights.gguf_shards import shard_name

# What is taken where a repository has several quantisations and none is asked for, as llama.cpp does.
DEFAULT_QUANT = "Q4_K_M"

_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::([\w./-]{1,200}))?", re.ASCII)
_HOST = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/")
_ADDRESS = re.compile(
    _HOST.pattern + r"(?!datasets/|spaces/)(?P<repo>[^/:?#]+/[^/:?#]+)"
    r"(?:/(?:blob|resolve)/[^/?#]+/(?P<file>[^?#]+)|/tree/[^/?#]+|(?P<quant>:[^?#]+))?/?(?:[?#].*)?"
)
_QUANT = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:I?Q[1-8]_[0-9A-Z]+(?:_[0-9A-Z]+)*|TQ[12]_0|BF16|F16|F32|MXFP4(?:_MOE)?|NVFP4)"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_LISTED = 30  # quantisations that an error lists


@dataclass(frozen=True)
class RepoName:
    """quant: as written, "" for none; also a file's path in the repository."""

    repo: str
    quant: str = ""

    @classmethod
    def parse(cls, name: str) -> RepoName | None:
        """None for what cannot be a repository: more or less than one slash, a path's beginning, .gguf.

        Also addresses as browsers and other engines have them: hf.co/owner/repo:QUANT, the page of a
        repository or of one of its files.
        """
        address = _ADDRESS.fullmatch(name)
        if address is None and _HOST.match(name):
            return None
        if address is not None:
            name = address["repo"] + (f":{address['file']}" if address["file"] else address["quant"] or "")
        match = _NAME.fullmatch(name)
        if match is None or (match[2] is None and name.endswith(".gguf")):
            return None
        return cls(match[1], match[2] or "")

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


@dataclass(frozen=True)
class RepoFile:
    path: str  # in the repository
    nbytes: int
    sha256: str = field(default="", compare=False)  # where the hub lists it, as it does of large files


@dataclass(frozen=True)
class RepoModel:
    """One model of a repository: its shards in order, or its single file."""

    quant: str  # as in the file's name; the name itself where it tells none
    files: tuple[RepoFile, ...]

    @classmethod
    def of(cls, files: tuple[RepoFile, ...]) -> RepoModel:
        """Files of one model, in order."""
        first = Path(files[0].path)
        stem = (shard_name(first) or (first.stem, 1, 1))[0]
        return cls(_quant_of(f"{first.parent}/{stem}"), files)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


class Hub:
    """endpoint None: huggingface-hub's own, https://huggingface.co unless HF_ENDPOINT says otherwise."""

    def __init__(self, endpoint: str | None = None) -> None:
        from huggingface_hub import HfFileSystem, constants  # a tenth of a second that no other command pays

        self._files = HfFileSystem(endpoint=endpoint or constants.ENDPOINT)

    @property
    def endpoint(self) -> str:
        return str(self._files.endpoint)

    def models(self, repo: str) -> list[RepoModel]:
        """Every model of the repository, by name. HubError: it is not there, closed, or holds none."""
        with self.explained(repo):
            entries: Any = self._files.find(repo, detail=True, refresh=True)
        files = [
            RepoFile(name.removeprefix(f"{repo}/"), int(entry["size"] or 0), _sha256(entry))
            for name, entry in entries.items()
            if name.endswith(".gguf") and not PurePosixPath(name).name.startswith("mmproj")
        ]
        if not files:
            safetensors = any(name.endswith(".safetensors") for name in entries)
            more = ", only safetensors; look for a repository with GGUF files of it" if safetensors else ""
            raise HubError(f"{repo}: holds no .gguf file{more}")
        return group_models(repo, files)

    @contextmanager
    def open(self, repo: str, file: RepoFile, *, block_bytes: int) -> Iterator[ReadAt]:
        """Ranges of one file; what is read comes in requests of at least `block_bytes`."""
        with self.explained(repo):
            opened = self._files.open(f"{repo}/{file.path}", "rb", block_size=block_bytes)

        def read_at(count: int, offset: int) -> bytes:
            with self.explained(repo):
                opened.seek(offset)
                return bytes(opened.read(count))

        try:
            yield read_at
        finally:
            opened.close()

    def metadata(self, repo: str, file: RepoFile) -> Any:
        """huggingface-hub's HfFileMetadata of one file: etag, size, location."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        with self.explained(repo):
            url = hf_hub_url(repo, file.path, endpoint=self.endpoint)
            return get_hf_file_metadata(url, endpoint=self.endpoint)

    def download(self, metadata: Any, out: Any, *, have: int, end: int) -> None:
        """The bytes from `have` up to `end`, appended to `out`: a file, or what writes to one.

        Of a file over 50 GB, which the hub's servers do not send as a whole (and huggingface-hub does not ask
        for without hf_xet), only a part can be had. Errors as they come.
        """
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            disable_progress_bars,
        )

        disable_progress_bars()  # `out` tells what comes
        ours = metadata.location.startswith(self.endpoint)  # the token is nobody else's business
        headers = build_hf_headers() if ours else build_hf_headers(token=False)
        if end < metadata.size:
            headers["Range"] = f"bytes=0-{end - 1}"  # from `have` on, where that is more than 0
        http_get(metadata.location, out, resume_size=have, headers=headers, expected_size=end)

    @contextmanager
    def explained(self, repo: str) -> Iterator[None]:
        """What huggingface-hub and the network raise, as a HubError that says what to do."""
        try:
            yield
        except IsthmusError:
            raise
        except Exception as error:
            raise self._explanation(repo, error) from None

    def _explanation(self, repo: str, error: Exception) -> Exception:
        from huggingface_hub import errors

        cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
        where = f"{repo} at {self.endpoint}"
        if isinstance(cause, errors.GatedRepoError):
            return HubError(f"{where} is gated: accept its terms on its page, then log in (hf auth login)")
        if isinstance(cause, errors.RepositoryNotFoundError | errors.HFValidationError):
            return HubError(
                f"there is no {where}, or it is private{self._near(repo)}; log in for a private one"
            )
        if isinstance(cause, errors.HfHubHTTPError):
            status = getattr(getattr(cause, "response", None), "status_code", 0)
            if status in (401, 403):
                return HubError(
                    f"{where} may not be read: {status}; log in with a token that may (hf auth login)"
                )
            return HubError(f"{where} cannot be read: the server answers {status}; try again later")
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return HubError(f"{where} is not read: HF_HUB_OFFLINE is set; unset it, or give a file's path")
        if isinstance(cause, OSError) or type(cause).__module__.split(".")[0].startswith("httpx"):
            return HubError(
                f"{where} cannot be reached ({type(cause).__name__}: {cause}); check the network, "
                "HF_ENDPOINT and proxies, or give the path of a file that is there"
            )
        return error

    def _near(self, repo: str) -> str:
        """The owner's repositories with similar names, in words; nothing if nobody can tell."""
        from huggingface_hub import HfApi

        owner, _, name = repo.partition("/")
        try:
            listed: Any = HfApi(endpoint=self.endpoint).list_models(author=owner, limit=500)
            names = {str(model.id).partition("/")[2]: str(model.id) for model in listed}
        except Exception:  # only a hint: the error is told without it
            return ""
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        return f" (did you mean {', '.join(names[n] for n in near)}?)" if near else ""


def _sha256(entry: Any) -> str:
    lfs = entry.get("lfs") or {}
    return str(lfs.get("sha256") or "")


def group_models(repo: str, files: list[RepoFile]) -> list[RepoModel]:
    """Files that belong together, the smallest model first. HubError for a set with shards missing."""
    models = []
    for shards, complete in group_sets(files):
        if not complete:
            stem, _, count = shard_name(Path(shards[0].path)) or (shards[0].path, 1, 1)
            raise HubError(f"{repo}: of {stem} only {len(shards)} of {count} files are there")
        models.append(RepoModel.of(shards))
    return sorted(models, key=lambda model: model.nbytes)


def group_sets(files: list[RepoFile]) -> Iterator[tuple[tuple[RepoFile, ...], bool]]:
    """(the files of one model in order, whether none is missing)."""
    sets: dict[tuple[str, int], dict[int, RepoFile]] = {}
    for file in files:
        stem, number, count = shard_name(Path(file.path)) or (PurePosixPath(file.path).stem, 1, 1)
        folder = str(PurePosixPath(file.path).parent)
        sets.setdefault((f"{folder}/{stem}", count), {})[number] = file
    for (_, count), shards in sorted(sets.items()):
        yield tuple(shards[i] for i in sorted(shards)), set(shards) == set(range(1, count + 1))


def choose_model(models: list[RepoModel], name: RepoName) -> RepoModel:
    """The model that is meant. UsageError that lists what there is for a quantisation that is not."""
    if not name.quant:
        found = models if len(models) == 1 else _called(models, DEFAULT_QUANT)
        if len(found) == 1:
            return found[0]
        raise UsageError(f"{name.repo} holds {len(models)} models; say which, as {name.repo}:{_list(models)}")
    by_path = [m for m in models if name.quant in {f.path for f in m.files}]
    found = by_path or _called(models, name.quant)
    if len(found) == 1:
        return found[0]
    if found:
        paths = ", ".join(model.files[0].path for model in found[:_LISTED])
        raise UsageError(
            f"{name.repo} holds {len(found)} models called {name.quant!r}; name the file: {paths}"
        )
    near = difflib.get_close_matches(name.quant.upper(), [m.quant.upper() for m in models], n=3, cutoff=0.5)
    hint = f" (did you mean {', '.join(near)}?)" if near else ""
    raise UsageError(f"{name.repo} has no {name.quant!r}{hint}; there are {_list(models)}")


def _called(models: list[RepoModel], quant: str) -> list[RepoModel]:
    return [model for model in models if model.quant.upper() == quant.upper()]


def _quant_of(stem: str) -> str:
    matches = _QUANT.findall(stem)
    return matches[-1] if matches else PurePosixPath(stem).name


def _list(models: list[RepoModel]) -> str:
    shown = ", ".join(f"{model.quant} ({model.nbytes / 1e9:.1f} GB)" for model in models[:_LISTED])
    return shown + (f" and {len(models) - _LISTED} more" if len(models) > _LISTED else "")
