"""A Hugging Face Hub in a thread: the answers its HTTP API gave when they were recorded, for files of a test.

Answers what huggingface-hub asks for when it lists a repository and reads ranges of its files, and counts
the bytes of files that went out.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Recorded:
    """repositories: owner/name -> path -> bytes. closed: repository -> (status, X-Error-Code)."""

    repositories: dict[str, dict[str, bytes]]
    closed: dict[str, tuple[int, str]] = field(default_factory=dict)
    sent_bytes: int = 0
    breaks_at: int | None = None  # byte of a file at which the connection ends
    says: dict[str, str] = field(default_factory=dict)  # path -> an ETag that is not its SHA-256
    sizes: dict[str, int] = field(default_factory=dict)  # path -> how long it says it is: zeros follow
    ranges: list[str] = field(default_factory=list)  # asked for of files, "" for the whole
    knows_ranges: bool = True
    requests: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def hub_server(recorded: Recorded) -> Iterator[Recorded]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            recorded.requests.append(self.path)
            path = self.path.partition("?")[0]
            if path == "/api/models":
                self._json([{"id": name, "_id": name} for name in recorded.repositories])
            elif match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(/.*)?", path):
                self._api(match[1], match[2] or "")
            elif match := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/main/(.+)", path):
                self._file(match[1], match[2])
            else:
                self._refuse(404, "")

        do_HEAD = do_GET

        def _api(self, repo: str, rest: str) -> None:
            if repo in recorded.closed:
                self._refuse(*recorded.closed[repo])
            elif repo not in recorded.repositories:
                self._refuse(401, "RepoNotFound")
            elif rest.startswith("/tree/main"):
                self._json([self._listed(*file) for file in recorded.repositories[repo].items()])
            else:
                self._json({"id": repo, "_id": repo, "sha": "0" * 40, "siblings": []})

        def _file(self, repo: str, path: str) -> None:
            if repo in recorded.closed:
                self._refuse(*recorded.closed[repo])
                return
            data = recorded.repositories[repo][path]
            size = recorded.sizes.get(path, len(data))
            asked = self.headers.get("Range", "") if recorded.knows_ranges else ""
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
            begin = int(match[1]) if match else 0
            end = int(match[2]) + 1 if match and match[2] else size
            stop = end if recorded.breaks_at is None else max(begin, min(end, recorded.breaks_at))
            part = b""
            if self.command != "HEAD":
                part = data[begin:stop].ljust(stop - begin, b"\0")
                recorded.sent_bytes += len(part)
                recorded.ranges.append(asked)
            headers = {"Content-Type": "application/octet-stream", "X-Repo-Commit": "0" * 40}
            headers["ETag"] = f'"{recorded.says.get(path) or hashlib.sha256(data).hexdigest()}"'
            if match:
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
            self._answer(206 if match else 200, part, headers, end - begin)

        def _listed(self, path: str, data: bytes) -> dict[str, Any]:
            size = recorded.sizes.get(path, len(data))
            entry = {"type": "file", "oid": "0" * 40, "path": path, "size": size}
            if path.endswith(".gguf"):
                oid = recorded.says.get(path) or hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"oid": oid, "size": size, "pointerSize": 134}
            return entry

        def _json(self, value: Any) -> None:
            self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _refuse(self, status: int, code: str) -> None:
            self._answer(status, b"{}", {"X-Error-Code": code, "Content-Type": "application/json"})

        def _answer(
            self, status: int, body: bytes, headers: dict[str, str], length: int | None = None
        ) -> None:
            """length: what is promised; less comes where the connection breaks."""
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
                self.close_connection = length is not None and length != len(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    recorded.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield recorded
    finally:
        server.shutdown()
        server.server_close()
