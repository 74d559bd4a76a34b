"""Compile the kernels for a Hopper card on a machine without one, and say what each takes: registers, stack (spills), shared memory.

    PYTHONPATH=src python tools/gpu/compile_kernels.py [NAME...]

Every wrapper runs on CPU tensors of the real shapes with launches turned into compilations, so a kernel that does not compile
or does not fit an SM is found before the card is asked for. Results of the wrappers are garbage."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

SHARED_LIMIT = 232_448  # bytes of shared memory a program may have on Hopper
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class NoCard:
    """The driver's answers that compiling needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def usage(kernel: Any) -> tuple[int, int]:
    """(registers, stack bytes) of the compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text[text.rindex("Function") :]).groups()
    return int(registers), int(stack)


def install(failures: list[str]) -> None:
    """Launches compile from now on and print one line each, once per kernel and configuration."""
    driver.set_active(NoCard())
    plain, seen = JITFunction.run, set()

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        start = time.time()
        kernel = plain(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash in seen:
            return
        seen.add(kernel.hash)
        registers, stack = usage(kernel)
        shared = kernel.metadata.shared
        print(
            f"  {self.__name__:28s} regs {registers:3d}  stack {stack:5d}  shared {shared:6d}  warps {kernel.metadata.num_warps}"
            f"  wgmma {kernel.asm['ptx'].count('wgmma.mma_async'):3d}  {time.time() - start:.1f} s",
            flush=True,
        )
        if shared > SHARED_LIMIT:
            failures.append(f"{self.__name__}: {shared} bytes of shared memory, {SHARED_LIMIT} at most")

    JITFunction.run = run


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    import kernel_cases

    failures: list[str] = []
    install(failures)
    for name, case in kernel_cases.CASES.items():
        if sys.argv[1:] and not any(want in name for want in sys.argv[1:]):
            continue
        print(name, flush=True)
        try:
            case("cpu")
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {str(error)[-600:]}")
            print("  FAILED", failures[-1], flush=True)
    print("\n".join(failures) or "all compiled")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
