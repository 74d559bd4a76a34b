"""A hub id from its first download on, against a server on this machine that answers as the hub does."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

REPO, COMMIT = "somebody/tiny-e", "0123456789abcdef0123456789abcdef01234567"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Hub(ThreadingHTTPServer):
    """folder: what the repository holds, beside a file that nobody should ask for. asked: paths of GET requests."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder, self.asked = folder, []


class Answer(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        names = [name for name in FILES if (self.server.folder / name).is_file()]
        if path.startswith(f"/api/models/{REPO}/tree/"):
            sizes = {name: (self.server.folder / name).stat().st_size for name in names} | {"pytorch_model.bin": 1 << 30}
            tree = [{"type": "file", "oid": COMMIT, "size": size, "path": name} for name, size in sizes.items()]
            self._send(json.dumps(tree).encode(), with_body, {"Content-Type": "application/json"})
        elif path.startswith(f"/api/models/{REPO}"):
            siblings = [{"rfilename": name} for name in [*names, "pytorch_model.bin"]]
            about = {"_id": "1", "id": REPO, "modelId": REPO, "sha": COMMIT, "private": False, "siblings": siblings, "tags": []}
            self._send(json.dumps(about).encode(), with_body, {"Content-Type": "application/json"})
        elif path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
            body = (self.server.folder / path.rpartition("/")[2]).read_bytes()
            self._send(body, with_body, {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT})
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, body: bytes, with_body: bool, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tiny_e: Path) -> Iterator[Hub]:
    server = Hub(tiny_e)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def lastrow(hub: Hub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    host, port = hub.server_address[:2]
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {
        "HF_ENDPOINT": f"http://{host}:{port}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    return subprocess.run([sys.executable, "-m", "lastrow", *arguments], capture_output=True, text=True, env=environment, timeout=120)


def test_a_hub_model_is_downloaded_with_a_progress_bar_and_then_comes_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    arguments = ("generate", REPO, "The LORD is my shepherd", "--max-tokens", "4", "--temperature", "0")
    first = lastrow(hub, tmp_path, *arguments)
    assert first.returncode == 0, first.stderr
    assert "Fetching" in first.stderr and "100%" in first.stderr, "the hub's library shows its bar on stderr"
    assert not any("pytorch_model.bin" in path for path in hub.asked), "only what is read is downloaded"
    assert len([path for path in hub.asked if "model.safetensors" in path]) == 1
    hub.shutdown()
    hub.server_close()
    offline = lastrow(hub, tmp_path, *arguments)
    assert offline.returncode == 0 and offline.stdout == first.stdout, "without the hub the cache is enough"


def test_a_model_that_the_hub_does_not_have_is_one_line(hub: Hub, tmp_path: Path) -> None:
    run = lastrow(hub, tmp_path, "info", "nobody/nothing")
    assert run.returncode == 2 and "no such model on the hub" in run.stderr and "Traceback" not in run.stderr
