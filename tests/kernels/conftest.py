"""Kernel tests: every operation against its reference, in Triton's interpreter on the CPU, and with `-m gpu` on the card."""

from __future__ import annotations

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test that takes `device` runs on the CPU (interpreter) and, marked gpu, on the card."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True, scope="session")
def exact_interpreter() -> None:
    """Imports triton here and not above: TRITON_INTERPRET is set in tests/conftest.py, after conftest files are imported."""
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        from kernels.triton_interpreter import install

        install()


@pytest.fixture(autouse=True)
def seeded() -> None:
    import torch

    torch.manual_seed(0)
