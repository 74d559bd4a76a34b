"""What a prompt's activations cost the kernel."""

from __future__ import annotations

import subprocess
import sys

PROMPTS = """
import resource
from lastrow import LLM, SamplingParams
llm = LLM("x", shape="e2b-eighth", load_format="dummy", dtype="float32", device="cpu", max_model_len=1024, max_num_seqs=1,
          kv_cache_memory_bytes=16_000_000, enable_prefix_caching=False)
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    llm.generate([list(range(3, 515))], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_prompt_like_the_last_one_needs_no_new_memory() -> None:
    """With glibc's defaults each takes 1,500 to 14,000 pages of 4 KiB. A process of its own: the thresholds are the process'."""
    made = subprocess.run([sys.executable, "-c", PROMPTS], capture_output=True, text=True, check=True)
    assert min(map(int, made.stdout.split()[2:])) < 200, made.stdout
