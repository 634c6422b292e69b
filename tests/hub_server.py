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
                files = recorded.repositories[repo].items()
                self._json([{"type": "file", "oid": "0" * 40, "path": p, "size": len(b)} for p, b in files])
            else:
                self._json({"id": repo, "_id": repo, "sha": "0" * 40, "siblings": []})

        def _file(self, repo: str, path: str) -> None:
            if repo in recorded.closed:
                self._refuse(*recorded.closed[repo])
                return
            data = recorded.repositories[repo][path]
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            end = int(match[2]) + 1 if match and match[2] else len(data)
            part = data[int(match[1]) : end] if match else data
            recorded.sent_bytes += 0 if self.command == "HEAD" else len(part)
            headers = {"Content-Type": "application/octet-stream", "X-Repo-Commit": "0" * 40}
            headers["ETag"] = f'"{recorded.says.get(path) or hashlib.sha256(data).hexdigest()}"'
            if match:
                headers["Content-Range"] = f"bytes {match[1]}-{end - 1}/{len(data)}"
            left = (
                None
                if recorded.breaks_at is None
                else max(0, recorded.breaks_at - int(match[1] if match else 0))
            )
            self._answer(206 if match else 200, part, headers, left)

        def _json(self, value: Any) -> None:
            self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _refuse(self, status: int, code: str) -> None:
            self._answer(status, b"{}", {"X-Error-Code": code, "Content-Type": "application/json"})

        def _answer(self, status: int, body: bytes, headers: dict[str, str], only: int | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[:only])
                self.close_connection = only is not None

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    recorded.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield recorded
    finally:
        server.shutdown()
        server.server_close()
