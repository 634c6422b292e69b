"""Downloaded models: in huggingface-hub's own cache, so that other tools see them and ours see theirs.

    <HF_HUB_CACHE>/models--owner--repo/blobs/ETAG               the bytes; ETAG is their SHA-256
                                      /blobs/ETAG.partial       the beginning of them, while they come
                                      /snapshots/COMMIT/PATH    the names, links to blobs

huggingface-hub throws away what an interrupted download has brought; here it stays and the next one goes on
from it. Files come in pieces, each from a location of its own, since locations expire after an hour and whole
files over 50 GB are not sent. Bytes are summed as they come and held against the SHA-256 that the hub states.
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from isthmus.errors import HubError, UsageError
from isthmus.weights.atomic import locked
from isthmus.weights.hub import Hub, RepoFile, RepoModel, RepoName, choose_model, group_sets

Progress = Callable[[int], None]  # bytes done since the last call

PARTIAL = ".partial"
# Asked for at once: at 10 MB/s a quarter of an hour.
PIECE_BYTES = 8 << 30
# Left free on the disk: a full one fails other programs too.
SPARE_BYTES = 256 << 20

_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,127}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOCK = 1 << 20


@dataclass(frozen=True)
class LocalModel:
    """A model that is here: the folder of its commit, and what `choose_model` chooses by."""

    repo: str
    model: RepoModel
    folder: Path

    @property
    def path(self) -> Path:
        """Of its first file, for `open_weights`."""
        return self.folder / self.model.files[0].path

    def __str__(self) -> str:
        return f"{self.repo}:{self.model.quant}"


class Downloads:
    """root None: huggingface-hub's cache (HF_HUB_CACHE, HF_HOME)."""

    def __init__(self, root: Path | None = None) -> None:
        if root is None:
            from huggingface_hub import constants

            root = Path(constants.HF_HUB_CACHE)
        self.root = root

    def repos(self) -> list[str]:
        """Repositories with anything of theirs here."""
        folders = sorted(self.root.glob("models--*--*")) if self.root.is_dir() else []
        return ["/".join(folder.name.split("--")[1:3]) for folder in folders]

    def models(self, repo: str) -> list[LocalModel]:
        """Whole models of a repository, the newest commit's of each name."""
        found: dict[tuple[str, ...], LocalModel] = {}
        for folder in self._snapshots(repo):
            files = [RepoFile(str(p.relative_to(folder)), p.stat().st_size) for p in _model_files(folder)]
            for shards, complete in group_sets(files):
                model = RepoModel.of(shards)
                if complete:
                    found.setdefault(tuple(f.path for f in shards), LocalModel(repo, model, folder))
        return sorted(found.values(), key=lambda local: local.model.nbytes)

    def find(self, name: RepoName) -> LocalModel | None:
        """The model that is meant, if it is here. UsageError if several may be."""
        here = self.models(name.repo)
        if not name.quant and len(here) == 1:
            return here[0]
        try:
            chosen = choose_model([local.model for local in here], name)
        except UsageError:
            if name.quant or not here:
                return None
            raise
        return next(local for local in here if local.model is chosen)

    def partial_bytes(self, repo: str) -> int:
        """Of downloads that have not ended."""
        return sum(p.stat().st_size for p in self._blobs(repo).glob("*" + PARTIAL))

    def need_bytes(self, repo: str, model: RepoModel) -> int:
        """What is still to come of a model, at most: a beginning counts if the hub lists the file's sum."""
        have = {p.name: p.stat().st_size for p in self._blobs(repo).glob("*" + PARTIAL)}
        local = {f.path: f.nbytes for one in self.models(repo) for f in one.model.files}
        missing = [f for f in model.files if local.get(f.path) != f.nbytes]
        return sum(max(0, f.nbytes - have.get(f"{f.sha256}{PARTIAL}", 0)) for f in missing)

    def check_room(self, nbytes: int) -> None:
        """HubError if the disk has no room for that much more."""
        folder = next(p for p in (self.root, *self.root.parents) if p.exists())
        free = shutil.disk_usage(folder).free
        if free < nbytes + SPARE_BYTES:
            raise HubError(
                f"{nbytes / 1e9:.1f} GB are to be downloaded to {self.root}, which has {free / 1e9:.1f} GB "
                "free; make room (isthmus list, isthmus rm), or set HF_HUB_CACHE to a folder that can take it"
            )

    def pull(self, hub: Hub, repo: str, model: RepoModel, progress: Progress) -> LocalModel:
        """Downloads what is missing. HubError, after which another call goes on where this one ended."""
        path = None
        for file in model.files:
            linked = self._pull_file(hub, repo, file, progress)
            path = path or linked
        assert path is not None
        return LocalModel(repo, model, path.parents[len(Path(model.files[0].path).parts) - 1])

    def remove(self, local: LocalModel) -> int:
        """Takes a model's names away, and its bytes where no other name leads to them; returns those."""
        links = [local.folder / file.path for file in local.model.files]
        files = {link.resolve() for link in links}  # the links themselves in a cache without any
        nbytes = {file: file.stat().st_size for file in files}
        for link in links:
            link.unlink()
        named = {p.resolve() for folder in self._snapshots(local.repo) for p in folder.rglob("*")}
        freed = sum(nbytes[file] for file in files - named)
        for file in files - named:
            file.unlink(missing_ok=True)
        if not self.models(local.repo) and not self.partial_bytes(local.repo):
            self._remove_empty(local.repo)
        return freed

    def remove_partials(self, repo: str) -> int:
        freed = self.partial_bytes(repo)
        for partial in self._blobs(repo).glob("*" + PARTIAL):
            partial.unlink()
        if not self.models(repo):
            self._remove_empty(repo)
        return freed

    def _pull_file(self, hub: Hub, repo: str, file: RepoFile, progress: Progress) -> Path:
        """The file's name in its snapshot."""
        from huggingface_hub import hf_hub_download

        blobs = self._blobs(repo)
        with hub.explained(repo), _room_and_rights(self.root):
            found = hub.metadata(repo, file)
            if not _NAME.fullmatch(found.etag or ""):  # it becomes a file's name
                raise HubError(f"{repo} at {hub.endpoint}: {file.path} has no usable ETag ({found.etag!r})")
            blob = blobs / found.etag
            blobs.mkdir(parents=True, exist_ok=True)
            with locked(self._lock(repo, blob.name)):
                if blob.exists():
                    progress(file.nbytes)
                else:
                    partial = blob.with_name(blob.name + PARTIAL)
                    with partial.open("a+b") as out:
                        _fetch(hub, found, _Summed(out, progress), repo, file)
                    partial.replace(blob)
            # It finds the bytes there, and makes the names that lead to them.
            return Path(hf_hub_download(repo, file.path, endpoint=hub.endpoint, cache_dir=self.root))

    def _remove_empty(self, repo: str) -> None:
        """A repository's folder, unless it holds bytes of something else."""
        blobs = self._blobs(repo)
        if not any(blobs.glob("*")):
            shutil.rmtree(self._folder(repo), ignore_errors=True)

    def _folder(self, repo: str) -> Path:
        return self.root / f"models--{repo.replace('/', '--')}"

    def _lock(self, repo: str, etag: str) -> Path:
        """Beside huggingface-hub's own, which it takes when it makes the names."""
        folder = self.root / ".locks" / self._folder(repo).name
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{etag}{PARTIAL}.lock"

    def _blobs(self, repo: str) -> Path:
        return self._folder(repo) / "blobs"

    def _snapshots(self, repo: str) -> list[Path]:
        """The commit that `main` was at last, then others by age."""
        folders = [p for p in (self._folder(repo) / "snapshots").glob("*") if p.is_dir()]
        main = self._folder(repo) / "refs" / "main"
        current = main.read_text().strip() if main.is_file() else ""
        return sorted(folders, key=lambda p: (p.name != current, -p.stat().st_mtime))


class _Summed:
    """A partial file as huggingface-hub writes it: at its end, with a sum over all that is in it."""

    def __init__(self, out: BinaryIO, progress: Progress) -> None:
        self._out = out
        self._progress = progress
        self._start()
        out.seek(0)
        while block := out.read(_BLOCK):
            self._sum.update(block)
            progress(len(block))

    def _start(self) -> None:
        self._sum = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._sum.hexdigest()

    def tell(self) -> int:
        return self._out.tell()

    def write(self, block: bytes) -> int:
        self._sum.update(block)
        self._progress(len(block))
        return self._out.write(block)

    def seek(self, offset: int) -> int:
        """The server sends everything again: only to the beginning."""
        assert offset == 0
        self._progress(-self._out.tell())
        self._start()
        return self._out.seek(0)

    def truncate(self) -> int:
        return self._out.truncate()

    def discard(self) -> None:
        self._out.seek(0)
        self._out.truncate()


def _fetch(hub: Hub, found: Any, out: _Summed, repo: str, file: RepoFile) -> None:
    while (have := out.tell()) < found.size:
        end = min(have + PIECE_BYTES, found.size)
        try:
            hub.download(found, out, have=have, end=end)
        except OSError:  # a server that knows no ranges has sent more than was asked for: all of it
            if out.tell() != found.size:
                raise
        if out.tell() < found.size:
            found = _located_again(hub, found, repo, file)
    wrong = ""
    if out.tell() != found.size:
        wrong = f"has {out.tell()} bytes where the hub says {found.size}"
    elif _SHA256.fullmatch(found.etag) and out.sha256 != found.etag:
        wrong = f"has the SHA-256 {out.sha256} where the hub says {found.etag}"
    if wrong:
        out.discard()
        raise HubError(f"{repo}: what came of {file.path} {wrong}; it was thrown away: pull it again")


def _located_again(hub: Hub, found: Any, repo: str, file: RepoFile) -> Any:
    again = hub.metadata(repo, file)
    if (again.etag, again.size) != (found.etag, found.size):
        raise HubError(f"{repo}: {file.path} was replaced while it came; pull it again")
    return again


@contextmanager
def _room_and_rights(root: Path) -> Iterator[None]:
    """Errors of the disk, which are not the network's."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HubError(
                f"the disk of {root} is full; make room (isthmus list, isthmus rm): the next pull goes on "
                "where this one ended"
            ) from None
        if error.errno == errno.EFBIG:  # 4 GiB less a byte on FAT
            raise HubError(
                f"the file system of {root} takes no files of this size; set HF_HUB_CACHE to a folder "
                "on another"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise HubError(
                f"{root} cannot be written ({error.strerror}); set HF_HUB_CACHE to a folder that can"
            ) from None
        raise


def _model_files(folder: Path) -> list[Path]:
    """Links whose bytes are there."""
    return sorted(p for p in folder.rglob("*.gguf") if p.is_file() and not p.name.startswith("mmproj"))
