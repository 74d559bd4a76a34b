"""K/V tests: those that run kernels do so in Triton's interpreter with the card's arithmetic."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def exact_interpreter() -> None:
    """Imports triton here and not above: TRITON_INTERPRET is set in tests/conftest.py, after conftest files are imported."""
    pytest.importorskip("triton")
    from kernels.triton_interpreter import install

    install()
