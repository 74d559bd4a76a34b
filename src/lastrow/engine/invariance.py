"""The promise of batch_invariant, tested at start-up on the device at hand: no library documents it."""

from __future__ import annotations

import torch

from lastrow.kernels.ops import Ops
from lastrow.models.config import Gemma4Config
from lastrow.models.weights import ModelWeights

ROWS = (1, 2, 7, 16, 33, 64, 65, 129, 192, 256, 511, 512, 768, 999, 1000, 2048, 16384)
"""Row counts around every change of kernel: the vendor's (found by the lab on an H200) and ours."""


class NotInvariant(RuntimeError):
    """A matmul gives a row other bits in another batch; the message names its shape and row counts."""


@torch.inference_mode()
def check_invariance(ops: Ops, weights: ModelWeights, config: Gemma4Config) -> int:
    """Compare every distinct matmul of the model at each of ROWS with itself at the largest, bit for bit, on random rows.

    Returns the number of comparisons. Raises NotInvariant at the first difference."""
    seen: set[tuple[object, ...]] = set()
    compared = 0

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """As the layers multiply; a sum that is left to its reader comes in fp32, [1, M, N]."""
        return ops.deferred_linear(x, weight).to(x.dtype).view(x.shape[0], -1)

    for layer in weights.layers:
        query_rows = layer.o.shape[1]
        plain = [layer.qkv, layer.qkv[:query_rows], layer.qkv[query_rows:], layer.o, layer.down, layer.ple_gate, layer.ple_projection]
        jobs = [("linear", product, w) for w in plain if w is not None and w.shape[0]] + [("geglu", ops.geglu, layer.gate_up)]
        jobs += [("head", ops.linear, weights.embed)]
        if weights.ple_model_projection is not None:
            before = config.cut * config.hidden_size_per_layer_input
            parts = (weights.ple_model_projection[:before], weights.ple_model_projection[before:])
            jobs += [("ple projection", product, part) for part in parts if part.shape[0]]
        for name, operation, weight in jobs:
            if (name, *weight.shape) in seen:
                continue
            seen.add((name, *weight.shape))
            most = ROWS[-1] if weight.is_cuda else 2048  # a CPU needs no larger ones, and they take it seconds
            if weight.shape[0] > 1 << 16:
                most = 256  # the head's outputs are large, and no step has more rows of it
            x = torch.randn(most, weight.shape[1], device=weight.device, dtype=weight.dtype)
            whole = operation(x, weight)
            for rows in (r for r in ROWS if r < most):
                compared += 1
                if not torch.equal(operation(x[:rows].contiguous(), weight), whole[:rows]):
                    raise NotInvariant(
                        f"batch_invariant: {name} with a weight {list(weight.shape)} gives {rows} rows other bits alone than in a batch "
                        f"of {most} on this device; run without batch_invariant, or report it with `pip list`"
                    )
    return compared
