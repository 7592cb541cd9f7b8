"""A stand-in for Hugging Face's hub, as much of it as `hf download` asks: one model, for whoever has its token."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REVISION = "0" * 40


@contextmanager
def model_hub(address: str, repository: str, directory: Path, token: str) -> Iterator[str]:
    """Yields its URL while it serves the files of a directory at this address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            file = directory / self.path.removeprefix(f"/{repository}/resolve/{REVISION}/")
            if self.headers["authorization"] != f"Bearer {token}":
                self._answer(401, b"")
            elif self.path.startswith(f"/api/models/{repository}/revision/"):
                self._answer(200, json.dumps({"id": repository, "sha": REVISION}).encode())
            elif self.path.startswith(f"/api/models/{repository}/tree/{REVISION}"):
                files = [{"type": "file", "path": each.name, "size": each.stat().st_size, "oid": ""} for each in directory.iterdir()]
                self._answer(200, json.dumps(files).encode())
            elif file.is_file():
                self._answer(200, file.read_bytes())
            else:
                self._answer(404, b"")

        do_HEAD = do_GET

        def _answer(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("x-repo-commit", REVISION)
            self.send_header("etag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer((address, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="hub")
        thread.start()
        try:
            yield f"http://{address}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
