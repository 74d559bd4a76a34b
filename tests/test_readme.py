"""What the README shows is what happens: its commands are run and print what stands below them, its Python runs."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import TINY_E

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
CONSOLE = re.findall(r"```console\n\$ (.*)\n((?:.*\n)*?)```", README)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PATH with a `lastrow` that runs this source."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "lastrow"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{TINY_E.parents[2]}" exec "{sys.executable}" -m lastrow "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize(("command", "shown"), CONSOLE, ids=[command[:40] for command, _ in CONSOLE])
def test_commands(path: str, command: str, shown: str) -> None:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env={**os.environ, "PATH": path}, check=False)
    assert done.stdout + (done.stderr if done.returncode else "") == shown


def test_python() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    namespace: dict[str, object] = {}
    for block in blocks:  # the second goes on where the first ended
        exec(compile(block, "README.md", "exec"), namespace)
