"""Six seconds of tools/soak.py: many clients, some of them rude. The long run is started by hand (docs/server.md has its result)."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from typing import Any

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
