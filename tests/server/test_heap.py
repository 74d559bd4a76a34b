"""The engine process keeps what its largest step needed: the same load again takes no page from the system."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from server.conftest import ServerProcess


def test_after_the_largest_step_a_load_takes_no_new_page(tmp_path: Path) -> None:
    """8,000 prompt tokens in one step have activations of 8 to 31 MiB a piece. With glibc's defaults each round took 18,000 pages and more
    anew, and the resident memory went up and down by 30 MiB."""
    server = ServerProcess(tmp_path, "--max-num-seqs", "64", "--device", "cpu").wait_ready()
    try:
        engine = server.engine_pid()

        def faults() -> int:
            return int(Path(f"/proc/{engine}/stat").read_text().rsplit(")", 1)[1].split()[7])

        async def load(number: int) -> None:
            prompts = [[2] + [300 + 32 * number + i] * 250 for i in range(32)]  # none begins as another one: nothing is cached
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
                bodies = [{"prompt": prompt, "max_tokens": 3, "ignore_eos": True} for prompt in prompts]
                answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
            assert all(answer.status_code == 200 for answer in answers)

        asyncio.run(load(0))
        asyncio.run(load(1))
        before = faults()
        for number in range(2, 5):
            asyncio.run(load(number))
        # fewer in three rounds than in one with the defaults; none but for rounds whose requests meet in a larger step than any before
        assert faults() - before < 18_000
    finally:
        server.stop()
