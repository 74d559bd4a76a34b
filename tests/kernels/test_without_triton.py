"""On a machine without triton the reference operations import and run; asking for a kernel is one clear line."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # absent, also for those who only look whether it is there (torch with CUDA)
import torch
from lastrow.kernels import add_norm
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.kernels.triton_ops import TritonOps
x, w = torch.ones(2, 8), torch.ones(8)
ReferenceOps().add_norm(x, x.clone(), w, w, None, 1e-6)
for act in (lambda: TritonOps(), lambda: add_norm.triton(x, x, w, w, None, 1e-6)):
    try:
        act()
    except (ValueError, RuntimeError) as error:
        print(type(error).__name__, error)
"""


def test_reference_operations_need_no_triton():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()
    assert first.startswith("ValueError --backend triton: triton is not installed")
    assert second.startswith("RuntimeError add_norm_kernel needs triton")
