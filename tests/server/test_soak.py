"""Six seconds of tools/soak.py: many clients, some of them rude. The long run is started by hand (docs/server.md has its result)."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from typing import Any

import pytest

from .conftest import ROOT, ServerProcess


def load_soak() -> Any:
    spec = importlib.util.spec_from_file_location("lastrow_soak", ROOT / "tools" / "soak.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_six_seconds_of_rude_clients_leave_no_wrong_answer_and_no_block(server: ServerProcess):
    report = asyncio.run(load_soak().soak(server.url, streams=32, seconds=6))
    assert not report.wrong
    assert not any(report.leaked.values())
    assert report.done["stream"] and report.done["leave"] and report.done["bad"] and report.done["forced"]


def test_growth_is_what_the_second_half_needs_more_than_the_first_after_its_burst():
    """Of 120 samples: a burst at the start hides nothing, memory that goes up and down is no growth, a leak is."""
    soak = load_soak()
    size = 500 * 2**20
    curves = {
        1: [size + (i < 5) * 2**26 + (i % 7) * 2**22 for i in range(120)],
        2: [size + (i < 5) * 2**26 + i * 2**17 for i in range(120)],
    }
    report = soak.Report(memory=[(float(i), {pid: curve[i] for pid, curve in curves.items()}) for i in range(120)])
    grown = report.growth()
    assert grown[1] == 0 and grown[2] == pytest.approx(60 / 8)
