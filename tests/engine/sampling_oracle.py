"""vLLM's sampling semantics for one request, one token at a time, in plain numpy and float64: the oracle of the engine's sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lastrow.core.sampling_params import SamplingParams

MASK = 2**64 - 1


def splitmix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(seed: int, index: int) -> float:
    return (splitmix((splitmix(seed & MASK) + (index + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11) / 2**53


def edit(logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop_ids: Sequence[int],
         bad_words: Sequence[Sequence[int]]) -> np.ndarray:  # fmt: skip
    """Bias, penalties and masks. Bad words and min_tokens give way where allowed_token_ids would be left without any."""
    x = logits.astype(np.float64)
    for token, value in (params.logit_bias or {}).items():
        x[token] += value
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    if params.allowed_token_ids is not None:
        x[[i for i in range(len(x)) if i not in params.allowed_token_ids]] = -np.inf
    before = x.copy()
    for word in bad_words:
        if list(word[:-1]) == list(output[len(output) - len(word) + 1 :]) and len(output) >= len(word) - 1:
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        x[list(stop_ids)] = -np.inf
    return x if np.isfinite(x).any() else before


def probabilities(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, min_p, top_k, top_p; tokens tied with the last kept one are kept."""
    x = x / params.temperature
    p = np.exp(x - x.max())
    p[p < params.min_p] = 0.0
    if params.top_k:
        p[p < np.sort(p)[-min(params.top_k, len(p))]] = 0.0
    p /= p.sum()
    if params.top_p < 1.0:
        order = np.sort(p)[::-1]
        above = np.concatenate(([0.0], np.cumsum(order)[:-1]))  # mass of everything likelier
        p[p < order[above < params.top_p].min()] = 0.0
    return p / p.sum()


def next_token(logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop_ids: Sequence[int],
               bad_words: Sequence[Sequence[int]] = (), seed: int | None = None) -> int:  # fmt: skip
    x = edit(logits, params, prompt, output, stop_ids, bad_words)
    if params.is_greedy:
        return int(x.argmax())
    ends = np.cumsum(probabilities(x, params))
    number = uniform(params.seed if seed is None else seed, len(output))
    return int(np.searchsorted(ends, number * ends[-1], side="right"))


def logprobs(logits: np.ndarray, token: int, k: int | None, explicit: Sequence[int] | None) -> dict[int, tuple[float, int | None]]:
    """token id -> (logprob, rank) of the raw logits."""
    x = logits.astype(np.float64)
    lp = x - (x.max() + np.log(np.exp(x - x.max()).sum()))
    found = {token: (lp[token], int((x > x[token]).sum()) + 1)}
    if explicit:
        return found | {i: (lp[i], None) for i in explicit if i != token}
    best = np.argsort(-x, kind="stable")[: len(x) if k == -1 else k or 0]
    return found | {int(i): (lp[i], rank + 1) for rank, i in enumerate(best) if i != token}


def generate(
    logits_of: Callable[[list[int]], np.ndarray], params: SamplingParams, prompt: list[int], stop_ids: frozenset[int],
    texts: Sequence[str], bad_words: Sequence[Sequence[int]], limit: int,
) -> tuple[list[int], str, str, list[dict[int, tuple[float, int | None]]]]:  # fmt: skip
    """Whole output of one request alone: (token ids, text, finish reason, logprobs)."""
    output: list[int] = []
    entries = []
    text = ""
    while True:
        logits = logits_of(prompt + output)
        token = next_token(logits, params, prompt, output, sorted(stop_ids), bad_words)
        entries.append(logprobs(logits, token, params.logprobs, params.logprob_token_ids))
        output.append(token)
        stopped = token in stop_ids and len(output) >= params.min_tokens
        before = text
        text += "" if stopped and not params.include_stop_str_in_output else texts[token]
        hits = [(text.find(s, max(0, len(before) - len(s) + 1)), s) for s in params.stop or ()] if len(output) > params.min_tokens else []
        hits = sorted(((at, s) for at, s in hits if at >= 0), key=lambda hit: hit[0])
        if hits:
            at, stop = hits[0]
            return output, text[: at + (len(stop) if params.include_stop_str_in_output else 0)], "stop", entries
        if stopped:
            return output, text, "stop", entries
        if len(output) == limit:
            return output, text, "length", entries
