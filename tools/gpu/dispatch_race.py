"""A warp-specialised kernel that uses no shared memory: what racecheck says of it, it says of Triton's dispatch.

    compute-sanitizer --tool racecheck --kernel-name kns=two_parts_kernel python tools/gpu/dispatch_race.py

Triton tells the other warps what to run by a byte of shared memory each, written before `barrier.sync 1` and read behind it (the PTX shows
both), which racecheck does not count as order. attention_ws.py is the one warp-specialised kernel here."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def write_one(out_ptr, which: gl.constexpr):
    gl.store(out_ptr + which, which + 1)


@gluon.jit
def two_parts_kernel(out_ptr, num_warps: gl.constexpr):
    gl.warp_specialize([(write_one, (out_ptr, 0)), (write_one, (out_ptr, 1))], [4], [40])


if __name__ == "__main__":
    out = torch.zeros(2, dtype=torch.int32, device="cuda")
    two_parts_kernel[(8,)](out, num_warps=4)
    assert out.tolist() == [1, 2]
