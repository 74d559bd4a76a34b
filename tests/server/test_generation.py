"""From outputs to choices, without a server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from lastrow.server.generation import Choice, outputs_by_choice


def test_nothing_reaches_a_finished_choice_and_the_engine_is_left_when_all_are():
    """Choice 1 meets its stop string in the first step, choice 0 in the third; a fourth step must not be asked for."""
    closed = []

    async def steps() -> Any:
        try:
            for step in range(5):
                yield [SimpleNamespace(index=i, step=step, prompt_logprobs={step: []} if i == 0 else None) for i in (0, 1)]
        finally:
            closed.append(step)

    async def read() -> list[tuple[int, int]]:
        choices, seen = [Choice(0), Choice(1)], []
        async for choice, output in outputs_by_choice(steps(), choices, prompt_logprobs):
            seen.append((choice.index, output.step))
            if output.step == {0: 2, 1: 0}[choice.index]:
                choice.finish_reason = "stop"
        return seen

    prompt_logprobs: dict[int, Any] = {}
    assert asyncio.run(read()) == [(0, 0), (1, 0), (0, 1), (0, 2)]
    assert closed == [2]
    assert list(prompt_logprobs) == [0, 1, 2]
