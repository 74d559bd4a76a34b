"""Options and profiles shared by all tests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

TINY_E = Path(__file__).parent.parent / "src" / "lastrow" / "assets" / "tiny-e"

# No deadline: two shared cores make single examples slow at random. derandomize: a red run is red for the next person too.
settings.register_profile("quick", deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--weights", default=None, help="folder or hub id of a published checkpoint, for tests marked `weights`")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported: kernels then run on CPU tensors
    if config.getoption("--hypothesis-profile", default=None) is None:
        settings.load_profile("quick")


@pytest.fixture(scope="session")
def tiny_e() -> Path:
    """The bundled checkpoint's folder."""
    return TINY_E


@pytest.fixture(scope="session")
def heldout() -> list[dict[str, Any]]:
    """Rows of the heldout.jsonl beside the bundled checkpoint; tests/README.md says what they hold."""
    with open(TINY_E / "heldout.jsonl", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
