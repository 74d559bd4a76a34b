"""From the engine's tokens to what a choice of a response holds: text, stop strings, logprobs, usage, timings."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from lastrow.engine.output_processor import find_stop, held_back
from lastrow.server import wire
from lastrow.server.output_parser import Delta, OutputParser
from lastrow.tokenizer import IncrementalDetokenizer, Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no -Infinity; vLLM's value


class StopFilter:
    """Lets text through up to the first stop string; an end that may begin one is held back.

    include: the stop string itself stays. stopped: the stop string that was met, else None."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = list(stops)
        self._include = include
        self._text = ""
        self._shown = 0
        self.stopped: str | None = None

    def take(self, text: str, final: bool = False, search: bool = True) -> str:
        """Text that can be shown now. search False: stop strings that end in this piece do not count (min_tokens)."""
        if not self._stops:
            return text
        if self.stopped is not None:
            return ""
        begin = len(self._text)
        self._text += text
        found = find_stop(self._text, begin, self._stops) if search and text else None
        if found is not None:
            place, self.stopped = found
            end = place + (len(self.stopped) if self._include else 0)
        else:
            end = len(self._text) - (0 if final else held_back(self._text, self._stops))
        shown, self._shown = self._text[self._shown : end], max(self._shown, end)
        return shown


class Choice:
    """One completion as it grows. Subclasses turn tokens into text. has_stops: stop strings may end it."""

    def __init__(self, index: int, has_stops: bool = False, hidden_stop_ids: frozenset[int] = frozenset()) -> None:
        self.index = index
        self.has_stops = has_stops
        self.token_ids: list[int] = []
        self.logprobs: list[list[wire.TokenLogprob]] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens = 0
        self.timings: wire.Timings | None = None
        self._hidden_stop_ids = hidden_stop_ids

    def _take(self, output: wire.Output) -> list[int]:
        """Book an output; returns the ids that are text: a stop token has none."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.finish_reason = output.finish_reason
        self.num_cached_tokens = output.num_cached_tokens
        self.timings = output.timings or self.timings
        if output.stop_reason not in self._hidden_stop_ids:
            self.stop_reason = output.stop_reason
        return output.token_ids

    def _stop(self, stop: str) -> None:
        """Ended here by a stop string; the engine, which does not know of them, is told to abort."""
        self.finish_reason, self.stop_reason = "stop", stop
        if self.timings is not None and self.timings.finished is None:
            self.timings.last_token = time.monotonic()
            self.timings.rows_given += len(self.token_ids) - 1
            self.timings.rows_computed += len(self.token_ids) - 1

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class ChatChoice(Choice):
    """stops: searched in the content alone."""

    def __init__(
        self, index: int, parser: OutputParser, stops: Sequence[str], include_stop: bool, min_tokens: int, hidden_stop_ids: frozenset[int]
    ) -> None:
        super().__init__(index, bool(stops), hidden_stop_ids)
        self.parser = parser
        self.content = ""
        self._filter = StopFilter(stops, include_stop)
        self._min_tokens = min_tokens

    def take(self, output: wire.Output) -> Delta:
        """What the output adds to the message."""
        ids = self._take(output)
        delta = self.parser.push(ids)
        if self.finished:
            last = self.parser.finish()
            delta.reasoning += last.reasoning
            delta.content += last.content
            delta.tool_calls += last.tool_calls
        delta.content = self._filter.take(delta.content, final=self.finished, search=len(self.token_ids) > self._min_tokens)
        self.content += delta.content
        if self._filter.stopped is not None:
            delta.tool_calls.clear()
            self._stop(self._filter.stopped)
        elif self.finish_reason == "stop" and self.parser.tool_calls:
            self.finish_reason = "tool_calls"
        return delta

    def show_something(self, include_reasoning: bool) -> str:
        """Text for an answer that would be empty although the model wrote something and ended by itself: its hidden thought."""
        hidden = self.parser.reasoning if not include_reasoning else ""
        if self.content or self.parser.tool_calls or not hidden or self.finish_reason != "stop":
            return ""
        return hidden


class TextChoice(Choice):
    """A plain completion."""

    def __init__(self, index: int, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool, stops: Sequence[str],
                 include_stop: bool, min_tokens: int) -> None:  # fmt: skip
        super().__init__(index, bool(stops))
        self.text = ""
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special)
        self._filter = StopFilter(stops, include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens

    def take(self, output: wire.Output) -> str:
        """The text that the output adds."""
        ids = self._take(output)
        if output.finish_reason == "stop" and ids and not self._include_stop:
            ids = ids[:-1]  # the stop token has no text, as in vLLM
        text = self._detokenizer.append(ids)
        if self.finished:
            text += self._detokenizer.flush()
        text = self._filter.take(text, final=self.finished, search=len(self.token_ids) > self._min_tokens)
        if self._filter.stopped is not None:
            self._stop(self._filter.stopped)
        self.text += text
        return text


# ---------------------------------------------------------------------------------------------------- logprobs
class LogprobWriter:
    """Logprobs in OpenAI's two forms. as_ids: tokens are written token_id:N."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token) or ""

    def chat(self, entries: list[wire.TokenLogprob], num_top: int) -> dict[str, Any]:
        """One token of `choice.logprobs.content`. entries: the sampled token first, then the asked-for ones; these alone where nothing is
        sampled, which is written as an empty text of probability 1."""
        token, logprob, rank = entries[0]
        own = {"token": "", "logprob": 0.0, "bytes": []} if rank is None else self._one(token, logprob)
        return {**own, "top_logprobs": [self._one(t, p) for t, p in best(entries, num_top)]}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": finite(logprob), "bytes": list(self._tokenizer.token_bytes(token))}

    def completion(self, tokens: Sequence[list[wire.TokenLogprob] | None], ids: Sequence[int], num_top: int, offset: int) -> dict[str, Any]:
        """`choice.logprobs` of a completion; tokens[i] is None where there is no logprob (the first of an echo). offset: characters
        before the first token. A leading <bos> has an entry but no characters: the echoed text does not show it. A place behind the ids
        is one where nothing is sampled; see `chat`."""
        written = [self.text(token) for token in ids]
        offsets = []
        for i, token in enumerate(ids):
            offsets.append(offset)
            hidden = i == 0 and token == self._tokenizer.bos_token_id
            offset += 0 if hidden else len(self._tokenizer.token_text(token) or "")
        own = [None if entry is None else finite(entry[0][1]) for entry in tokens[: len(ids)]]
        unsampled = len(tokens) - len(ids)
        return {
            "text_offset": offsets + [offset] * unsampled,
            "token_logprobs": own + [0.0] * unsampled,
            "tokens": written + [""] * unsampled,
            "top_logprobs": [
                None if entry is None else {self.text(t): finite(p) for t, p in _with_own(entry, num_top)} for entry in tokens
            ],
        }  # fmt: skip

    def prompt(self, entry: list[wire.TokenLogprob]) -> dict[str, Any]:
        """One position of vLLM's prompt_logprobs."""
        return {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": self._tokenizer.token_text(token)}
            for token, logprob, rank in entry
        }


def best(entries: list[wire.TokenLogprob], num_top: int) -> list[tuple[int, float]]:
    """The likeliest of the entries: all that were asked for by id (rank None), else the num_top best."""
    if any(rank is None for _, _, rank in entries):
        return [(token, logprob) for token, logprob, _ in entries]
    ordered = sorted(entries, key=lambda entry: -entry[1])
    return [(token, logprob) for token, logprob, _ in (ordered if num_top < 0 else ordered[:num_top])]


def _with_own(entries: list[wire.TokenLogprob], num_top: int) -> list[tuple[int, float]]:
    """OpenAI's completions show the sampled token beside the best ones."""
    top = best(entries, num_top)
    own = entries[0][:2]
    return top if own in top else [*top, own]


def finite(logprob: float) -> float:
    return LEAST_LOGPROB if not math.isfinite(logprob) else logprob


# ---------------------------------------------------------------------------------------------------- usage, timings
def usage(num_prompt_tokens: int, choices: Iterable[Choice], num_reasoning_tokens: int | None = None) -> dict[str, Any]:
    choices = list(choices)
    completion = sum(len(choice.token_ids) for choice in choices)
    report: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "total_tokens": num_prompt_tokens + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": max((choice.num_cached_tokens for choice in choices), default=0)},
    }
    if num_reasoning_tokens is not None:
        report["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return report


def timings(num_prompt_tokens: int, choices: Iterable[Choice]) -> dict[str, Any] | None:
    """Of one prompt's choices: seconds from arrival on, and rates. None while no choice has ended."""
    known = [(choice.timings, len(choice.token_ids)) for choice in choices if choice.timings is not None]
    if not known:
        return None
    first = known[0][0]
    # Without a sampled token (prompt logprobs alone) the prompt's end is the request's.
    tokens, end = sum(count for _, count in known), max(t.last_token or t.finished or t.arrival for t, _ in known)
    started = min(t.first_token or end for t, _ in known)
    scheduled = first.scheduled if first.scheduled is not None else first.arrival
    prefill, decode = started - scheduled, end - started
    return {
        "queue_seconds": scheduled - first.arrival,
        "prefill_seconds": prefill,
        "decode_seconds": decode,
        "total_seconds": end - first.arrival,
        "time_to_first_token_seconds": started - first.arrival,
        "prompt_tokens_per_second": num_prompt_tokens / prefill if prefill > 0 else None,
        "tokens_per_second": (tokens - len(known)) / decode if decode > 0 and tokens > len(known) else None,
        "rows_given": sum(t.rows_given for t, _ in known),
        "rows_computed": sum(t.rows_computed for t, _ in known),
    }


C = TypeVar("C", bound=Choice)


def _token_by_token(output: wire.Output) -> Iterator[wire.Output]:
    """What steps of one token would have brought. A step with drafts brings several; a stop string then ends the answer, its logprobs
    and its usage at the token that completes it, and min_tokens counts the tokens in front of it."""
    last = len(output.token_ids) - 1
    if last < 1:
        yield output
        return
    for i, token in enumerate(output.token_ids):
        part = msgspec.structs.replace(output, token_ids=[token], logprobs=None if output.logprobs is None else [output.logprobs[i]])
        if i < last:
            part.finish_reason = part.stop_reason = None
        yield part


async def outputs_by_choice(
    outputs: AsyncGenerator[list[wire.Output]], choices: Sequence[C], prompt_logprobs: dict[int, list[wire.TokenLogprob]]
) -> AsyncGenerator[tuple[C, wire.Output]]:
    """Every output with the choice that takes it, without what comes after a choice's stop string; ends, and closes
    `outputs`, when all choices have finished. `prompt_logprobs` gets what the outputs bring."""
    async with aclosing(outputs):
        async for some in outputs:
            for output in some:
                choice = choices[output.index]
                if output.prompt_logprobs and not choice.finished:
                    prompt_logprobs.update(output.prompt_logprobs)
                for part in _token_by_token(output) if choice.has_stops else (output,):
                    if not choice.finished:
                        yield choice, part
            if all(choice.finished for choice in choices):
                return
