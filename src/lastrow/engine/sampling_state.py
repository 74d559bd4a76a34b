"""What one request asks of the sampler, prepared once: the edits of its logits, its seed, and its logprob wishes.

vLLM's meanings: repetition penalty over prompt and output, presence and frequency over the output, bad words over the output,
min_tokens masks the stop ids, logit_bias is added before the penalties.

Some token has to come. Masks that can leave none for the first one are refused when the request arrives (`contradiction`); where it
happens later, as a bad word or a grammar has it, the weaker gives way (`RequestSampling.masks`)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from lastrow.core.request import Request
from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.transfer import upload

RANDOM, LOGPROBS, EDITS, HISTORY = 1, 2, 4, 8  # HISTORY: edits that depend on the output so far


class Grammar(Protocol):
    """A structured-output constraint of one request; engine/structured_output.py makes them."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def failure(self) -> str | None: ...

    def accept(self, token: int) -> bool: ...

    def rollback(self, num_tokens: int) -> None: ...

    def fill_mask(self, row: np.ndarray) -> None: ...


class TokenCounts:
    """Distinct tokens of a growing output and how often each came; the arrays are views, valid until the next update."""

    def __init__(self) -> None:
        self._place: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.empty(64, np.float32)
        self.seen = 0

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: len(self._place)]

    def update(self, tokens: Sequence[int]) -> None:
        """Take in what `tokens` holds beyond what was seen before."""
        for token in tokens[self.seen :]:
            place = self._place.get(token)
            if place is None:
                place = self._place[token] = len(self._place)
                if place == len(self._ids):
                    self._ids, self._counts = np.resize(self._ids, 2 * place), np.resize(self._counts, 2 * place)
                self._ids[place], self._counts[place] = token, 0
            self._counts[place] += 1
        self.seen = len(tokens)

    def with_more(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """(ids, counts) as if `tokens` had come, too; nothing is kept of them."""
        if not tokens:
            return self.ids, self.counts
        extra = Counter(tokens)
        counts, new = self.counts.copy(), [token for token in extra if token not in self._place]
        for token in extra.keys() & self._place.keys():
            counts[self._place[token]] += extra[token]
        ids = np.concatenate((self.ids, np.array(new, np.int64)))
        return ids, np.concatenate((counts, np.array([extra[token] for token in new], np.float32)))


NO_IDS = np.zeros(0, np.int64)
NO_COUNTS = TokenCounts()


class RequestSampling:
    """Sampling state of one request while it has a slot; rebuilt from the request after a preemption.

    encode: text -> token ids without BOS, for bad_words."""

    def __init__(
        self,
        request: Request,
        vocab_size: int,
        device: torch.device,
        encode: Callable[[str], list[int]] | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.vocab_size = vocab_size
        self.grammar = grammar
        self.seed = 0 if params.is_greedy else request_seed(request)
        self.num_logprobs = params.logprobs
        self.logprob_token_ids = list(params.logprob_token_ids or ())
        bias = params.logit_bias
        self.bias_ids = np.fromiter(bias, np.int64) if bias else NO_IDS
        self.bias_values = np.fromiter(bias.values(), np.float32) if bias else NO_IDS
        self.bad_words = bad_word_ids(params.bad_words or (), encode)
        self.min_tokens = params.min_tokens
        self.stop_ids = np.fromiter(sorted(request.stop_token_ids), np.int64) if self.min_tokens else NO_IDS
        self.device = device
        self.disallowed: np.ndarray | None = None
        self.disallowed_on_device: torch.Tensor | None = None
        self.num_allowed = vocab_size
        if params.allowed_token_ids is not None:
            self.disallowed = np.ones(vocab_size, bool)
            self.disallowed[list(params.allowed_token_ids)] = False
            self.disallowed_on_device = upload(self.disallowed, device)
            self.num_allowed -= np.count_nonzero(self.disallowed)
        self.presence, self.frequency = params.presence_penalty, params.frequency_penalty
        self.repetition = params.repetition_penalty
        self.output_counts = TokenCounts() if self.presence or self.frequency or self.repetition != 1.0 else NO_COUNTS
        self.prompt_ids = np.unique(np.array(request.prompt_token_ids, np.int64)) if self.repetition != 1.0 else NO_IDS
        self.flags = self._flags()

    def _flags(self) -> int:
        params = self.request.sampling_params
        history = self.bad_words or self.min_tokens or self.grammar is not None or self.presence or self.frequency or self.repetition != 1.0
        flags = 0 if params.is_greedy else RANDOM
        flags |= LOGPROBS if self.num_logprobs is not None or self.logprob_token_ids else 0
        if history:
            return flags | EDITS | HISTORY
        return flags | (EDITS if len(self.bias_ids) or self.disallowed is not None else 0)

    def count_output(self) -> None:
        if self.presence or self.frequency or self.repetition != 1.0:
            self.output_counts.update(self.request.output_token_ids)

    def disallowed_by_grammar(self, grammar: Grammar, drafts: Sequence[int] = ()) -> np.ndarray:
        """[V] bool, after the grammar has seen the output so far and `drafts`. Nothing is disallowed behind a draft that the grammar
        refuses: the target cannot sample that draft, so the row is never looked at."""
        for token in self.request.output_token_ids[grammar.num_tokens :]:
            grammar.accept(token)
        taken = 0
        for token in drafts:
            if not grammar.accept(token):
                break
            taken += 1
        row = np.ones(self.vocab_size, np.bool_)
        if taken == len(drafts):
            grammar.fill_mask(row)
        grammar.rollback(taken)
        return ~row

    def repeated_ids(self, drafts: Sequence[int] = ()) -> np.ndarray:
        """Distinct tokens of prompt, output and `drafts`."""
        ids = np.union1d(self.prompt_ids, self.output_counts.ids)
        return np.union1d(ids, np.array(drafts, np.int64)) if drafts else ids

    def masks(self, output_index: int, drafts: Sequence[int] = ()) -> tuple[torch.Tensor | None, np.ndarray | list[int]]:
        """What may not be the output token number `output_index` (from 0), with `drafts` at the output's end: [V] bool on the device
        (None: nothing), and further ids.

        Where together they leave no token, bad words and min_tokens give way to allowed_token_ids, and these to the grammar."""
        disallowed, on_device, num_allowed = self.disallowed, self.disallowed_on_device, self.num_allowed
        if self.grammar is not None:
            by_grammar = self.disallowed_by_grammar(self.grammar, drafts)
            both = by_grammar if disallowed is None else by_grammar | disallowed
            disallowed = by_grammar if both.all() else both
            on_device, num_allowed = upload(disallowed, self.device), self.vocab_size - np.count_nonzero(disallowed)
        masked = self.masked_ids(output_index, drafts)
        if len(masked) >= num_allowed:
            left = np.ones(self.vocab_size, bool) if disallowed is None else ~disallowed
            left[masked] = False
            if not left.any():
                masked = []
        return on_device, masked

    def masked_ids(self, output_index: int, drafts: Sequence[int] = ()) -> np.ndarray | list[int]:
        """Ids that may not be the output token number `output_index` (from 0), with `drafts` at the output's end."""
        masked = [words[-1] for words in self.bad_words if self._ends_with(words[:-1], drafts)]
        if output_index < self.min_tokens:
            return np.concatenate((self.stop_ids, np.array(masked, np.int64)))
        return masked

    def _ends_with(self, words: list[int], drafts: Sequence[int]) -> bool:
        if not words:
            return True
        output = self.request.output_token_ids[-len(words) :]
        return (output + list(drafts))[-len(words) :] == words


def contradiction(
    params: SamplingParams, stop_token_ids: Collection[int], vocab_size: int, encode: Callable[[str], list[int]] | None
) -> str | None:
    """Why no token can be the first of the output, in words; None where one can.

    stop_token_ids: the request's effective ones. A grammar is left out of account: it goes before the other masks. A logit_bias only
    changes the order."""
    stops = set(stop_token_ids) if params.min_tokens else set[int]()
    allowed = None if params.allowed_token_ids is None else set(params.allowed_token_ids)
    num_allowed = vocab_size if allowed is None else len(allowed)
    if num_allowed > len(stops) + 2 * len(params.bad_words or ()):  # two spellings of each word: most requests end here
        return None
    words = {ids[0] for ids in bad_word_ids(params.bad_words or (), encode) if len(ids) == 1}
    candidates = set(range(vocab_size)) if allowed is None else allowed
    if candidates - words - stops:
        return None
    of = f"the {vocab_size} ids of the vocabulary" if allowed is None else f"allowed_token_ids {_some(allowed)}"
    excluded = [f"bad_words excludes {_some(candidates & words)}"] if candidates & words else []
    if candidates & stops:
        excluded.append(f"min_tokens={params.min_tokens} excludes stop ids {_some(candidates & stops)}")
    return f"no token can be the first: of {of}, {' and '.join(excluded)}; allow one more id"


def _some(ids: Collection[int]) -> str:
    shown = ", ".join(map(str, sorted(ids)[:5]))
    return f"[{shown}, ...]" if len(ids) > 5 else f"[{shown}]"


def bad_word_ids(words: Iterable[str], encode: Callable[[str], list[int]] | None) -> list[list[int]]:
    """Token sequences of each word, as it stands and with a leading space where that changes the first token only.

    Raises ValueError without a tokenizer. Source: vLLM SamplingParams.update_from_tokenizer."""
    sequences: list[list[int]] = []
    for word in words:
        if encode is None:
            raise ValueError("bad_words needs a tokenizer, and this engine has none: use logit_bias with token ids")
        plain, spaced = encode(word.lstrip()), encode(" " + word.lstrip())
        sequences += [ids for ids in (plain,) if ids]
        if spaced and plain and spaced[0] != plain[0] and len(spaced) == len(plain):
            sequences.append(spaced)
    return sequences


def request_seed(request: Request) -> int:
    """The request's own seed, or one made of its id, as 64 bits."""
    seed = request.sampling_params.seed
    if seed is None:
        return int.from_bytes(hashlib.blake2b(request.request_id.encode(), digest_size=8).digest(), "little")
    return seed & (2**64 - 1)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele, Lea, Flood 2014) on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: np.ndarray, output_index: np.ndarray) -> np.ndarray:
    """seeds [n] uint64, output_index [n] -> [n] float64 in [0, 1), a function of the pair alone.

    Counter-based: which number a token gets depends on nothing that happened before it, so preemption, batching and steps in
    flight cannot change it."""
    counter = (output_index.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(_mix(seeds.astype(np.uint64)) + counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53
