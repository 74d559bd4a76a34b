"""The names kernels are written with. Without triton installed they still import, so that the reference operations work
everywhere; launching a kernel then fails with one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # the kernels' language is not Python's: types stop here
    TensorDescriptor: Any
    gdc_launch_dependents: Any
    gdc_wait: Any

    class Language(type):
        def __getattr__(cls, name: str) -> Any: ...

    class tl(metaclass=Language):
        constexpr: TypeAlias = Any

    L2E: Any
    FP8_BITS: Any
    FP8_TO_BF16: Any
    HAS_TRITON: bool
    INTERPRETED: bool

    def jit(fn: Any = None, **options: Any) -> Any: ...
    def next_power_of_2(n: int) -> int: ...
else:
    try:
        import triton
        import triton.language as tl
        from triton import jit, next_power_of_2
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
        from triton.tools.tensor_descriptor import TensorDescriptor

        HAS_TRITON = True
        INTERPRETED = bool(triton.knobs.runtime.interpret)
    except ImportError:
        HAS_TRITON = False
        INTERPRETED = False
        tl = SimpleNamespace(constexpr=lambda value: value)
        gdc_launch_dependents = gdc_wait = TensorDescriptor = None

        def next_power_of_2(n):
            return 1 << (n - 1).bit_length()

        class Kernel:
            """A kernel that cannot be launched here."""

            def __init__(self, fn):
                self.fn = fn

            def __getitem__(self, grid):
                raise RuntimeError(f"{self.fn.__name__} needs triton: pip install 'lastrow[gpu]', or run with --backend reference")

        def jit(fn=None, **options):
            return Kernel if fn is None else Kernel(fn)

    L2E = tl.constexpr(1.4426950408889634)  # log2(e): softmax by exp2
    FP8_BITS = tl.constexpr(HAS_TRITON and not INTERPRETED)  # whether PTX runs
    FP8_TO_BF16 = tl.constexpr("""{
        .reg .b32 a, b, c, d, bias;
        mov.b32 bias, 0x7b807b80;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.u32 c, a, 4;
        shr.u32 d, b, 4;
        and.b32 c, c, 0x07f007f0;
        and.b32 d, d, 0x07f007f0;
        lop3.b32 a, a, 0x80008000, c, 0xea;
        lop3.b32 b, b, 0x80008000, d, 0xea;
        mul.rn.bf16x2 $0, a, bias;
        mul.rn.bf16x2 $1, b, bias;
    }""")  # four e4m3 to four bf16: sign, exponent and mantissa into place, times 2^120


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@jit
def round_to(x, dtype: tl.constexpr):
    """One rounding of an fp32 value to `dtype`, back in fp32."""
    return x.to(dtype).to(tl.float32)


@jit
def gelu_tanh(x):
    # 0.5 x (1 + tanh z) = x sigmoid(2z), with z = sqrt(2/pi) (x + 0.044715 x^3)
    z2 = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp2(-1.4426950408889634 * z2))


__all__ = [
    "FP8_BITS", "FP8_TO_BF16", "HAS_TRITON", "INTERPRETED", "L2E", "TensorDescriptor", "cdiv", "gdc_launch_dependents", "gdc_wait",
    "gelu_tanh", "jit", "next_power_of_2", "round_to", "tl",
]  # fmt: skip
