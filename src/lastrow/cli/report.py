"""What a run did, for people (one line on stderr) and for programs (--json)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lastrow.core.output import RequestOutput


def timings(output: RequestOutput) -> dict[str, Any]:
    """Counts and seconds of one request. rows_computed of rows_given: what the layers after the cut ran on."""
    metrics = output.metrics
    tokens = sum(len(completion.token_ids) for completion in output.outputs)
    record: dict[str, Any] = {
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "completion_tokens": tokens,
    }
    if metrics is None:
        return record
    end = metrics.finished_time or metrics.last_token_time
    decode = end - metrics.first_token_time if end is not None and metrics.first_token_time is not None else None
    return record | {
        "queue_s": metrics.time_in_queue,
        "first_token_s": metrics.time_to_first_token,
        "total_s": end - metrics.arrival_time if end is not None else None,
        "decode_tokens_per_s": (tokens - 1) / decode if decode and tokens > 1 else None,
        "rows_given": metrics.rows_given,
        "rows_computed": metrics.rows_computed,
    }


def summary(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """One line over all requests of a run."""
    records = [timings(output) for output in outputs]

    def total(key: str) -> int:
        return sum(record.get(key) or 0 for record in records)

    prompt, cached, made = total("prompt_tokens"), total("cached_tokens"), total("completion_tokens")
    parts = [f"{prompt:,} prompt tokens" + (f" ({cached:,} cached)" if cached else ""), f"{made:,} new in {seconds:.2f} s"]
    if len(records) == 1:
        first, speed = records[0].get("first_token_s"), records[0].get("decode_tokens_per_s")
        parts += [f"first after {first * 1000:.0f} ms"] if first is not None else []
        parts += [f"then {speed:,.0f} tokens/s"] if speed is not None else []
    else:
        parts.append(f"{made / seconds:,.0f} tokens/s in {len(records)} requests")
    given, computed = total("rows_given"), total("rows_computed")
    if given:
        parts.append(f"shared layers ran on {computed:,} of {given:,} rows ({computed / given:.0%})")
    return " · ".join(parts)


def document(output: RequestOutput) -> dict[str, Any]:
    """One request of `generate --json`."""
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [
            {
                "index": completion.index,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": None if completion.finish_reason is None else str(completion.finish_reason),
                "stop_reason": completion.stop_reason,
            }
            for completion in output.outputs
        ],
        "timings": timings(output),
    }
