"""tiny-e as an engine and in transformers, and the held-out decisions of tools/decisions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lastrow.decisions.splice import Splicer
from lastrow.engine.llm import LLM
from lastrow.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tools" / "decisions"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small lose time to a second thread
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM("tiny-e", max_model_len=2048)


@pytest.fixture(scope="session")
def splicer(tiny_e: Path) -> Splicer:
    return Splicer(Tokenizer(tiny_e))


@pytest.fixture(scope="session")
def reference() -> Any:
    """tiny-e in transformers, fp32."""
    import held_out

    return held_out.Transformers()
