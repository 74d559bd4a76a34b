"""lastrow: inference for the Gemma 4 family that computes only the rows somebody will read.

    from lastrow import LLM, SamplingParams
    print(LLM("tiny-e").generate("In the beginning", SamplingParams(max_tokens=20))[0].outputs[0].text)

Importing the package imports nothing heavy; torch is loaded when `LLM` is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lastrow.core.output import CompletionOutput, RequestOutput
    from lastrow.core.sampling_params import SamplingParams
    from lastrow.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "lastrow.engine.llm",
    "SamplingParams": "lastrow.core.sampling_params",
    "RequestOutput": "lastrow.core.output",
    "CompletionOutput": "lastrow.core.output",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lastrow' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
