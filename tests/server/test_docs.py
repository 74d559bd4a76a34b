"""Every curl example of the documentation runs against a real server; the JSON under it must be part of the answer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from .conftest import ROOT, ServerProcess

EXAMPLE = re.compile(r"```sh\n(curl .*?)```\n(?:```json\n(.*?)```)?", re.S)
FILES = [path for path in (ROOT / "docs" / "server.md", ROOT / "README.md") if path.exists()]
EXAMPLES = [(path.name, *match.groups()) for path in FILES for match in EXAMPLE.finditer(path.read_text(encoding="utf-8"))]


def assert_within(part: Any, whole: Any, where: str = "answer") -> None:
    if isinstance(part, dict):
        assert isinstance(whole, dict), where
        for key, value in part.items():
            assert_within(value, whole.get(key), f"{where}.{key}")
    elif isinstance(part, list):
        assert isinstance(whole, list) and len(whole) == len(part), f"{where}: {whole}"
        for i, value in enumerate(part):
            assert_within(value, whole[i], f"{where}[{i}]")
    else:
        assert whole == part, f"{where}: {whole!r}, documented is {part!r}"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("name, command, expected", EXAMPLES, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(EXAMPLES)])
def test_a_documented_example_answers_as_documented(server: ServerProcess, name: str, command: str, expected: str | None):
    command = re.sub(r"(http://)?(127\.0\.0\.1|localhost):8000", server.url, command).replace("curl ", "curl -sS --fail-with-body ", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    if expected:
        assert_within(json.loads(expected), json.loads(done.stdout))


def test_there_are_examples():
    assert len(EXAMPLES) >= 6
