"""Tokens -> text and RequestOutput: detokenization, stop strings, logprob texts, n completions of one prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lastrow.core.output import CompletionOutput, EngineCoreOutput, Logprob, RequestOutput
from lastrow.core.request import FinishReason, Request
from lastrow.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(slots=True)
class RequestGroup:
    """The completions of one prompt, under the id its caller knows."""

    request_id: str
    prompt: str | None
    stream: bool
    members: list[CompletionState] = field(default_factory=list)
    unfinished: int = 0


class CompletionState:
    """Output of one Request as it grows.

    Text is made as tokens arrive only where somebody needs it then: a stream, or stop strings; else once, at the end."""

    def __init__(self, request: Request, stream: bool, index: int, tokenizer: Tokenizer | None) -> None:
        params = request.sampling_params
        self.request = request
        self.index = index
        self.tokenizer = tokenizer
        self.stops: Sequence[str] = params.stop or ()
        self.text = ""
        self.logprobs: list[dict[int, Logprob]] | None = None
        self.prompt_logprobs: dict[int, dict[int, Logprob]] = {}
        self.label_logits: dict[int, tuple[list[float], float | None]] = {}
        self.cumulative_logprob: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._eager = stream or bool(self.stops)
        self._pending: list[int] = []
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)

    # ------------------------------------------------------------------------------------------------------ growing
    def take(self, output: EngineCoreOutput) -> str | None:
        """Take in what a step brought. Returns the stop string that ends the output here, if one does."""
        if output.prompt_logprobs:
            self.prompt_logprobs.update(self._with_texts(output.prompt_logprobs))
        if output.label_logits:
            self.label_logits.update(output.label_logits)
        if output.new_logprobs is not None:
            self._take_logprobs(output)
        self._pending += output.new_token_ids
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        finished = output.finish_reason is not None
        if not (self._eager or finished) or self._detokenizer is None:
            return None
        stop = self._detokenize(self._detokenizer, finished)
        if stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        return stop

    def _detokenize(self, detokenizer: IncrementalDetokenizer, finished: bool) -> str | None:
        params = self.request.sampling_params
        pending, self._pending = self._pending, []
        behind = len(pending)
        if self.finish_reason is FinishReason.STOP and pending and not params.include_stop_str_in_output:
            pending = pending[:-1]  # the stop token has no text, as in vLLM
        if not self.stops:
            self.text += detokenizer.append(pending) + (detokenizer.flush() if finished else "")
            return None
        # Stop strings count from output token min_tokens + 1 on, so the text before it is not searched.
        count = len(self.request.output_token_ids) - len(pending)
        for token in pending:
            count += 1
            behind -= 1
            searched = self._add_text(detokenizer.append([token]), count > params.min_tokens)
            if searched is not None:
                self._drop_tokens(behind)
                return searched
        return self._add_text(detokenizer.flush(), count > params.min_tokens) if finished else None

    def _drop_tokens(self, count: int) -> None:
        """Take back the last tokens: a step with drafts can bring more than the one that completes a stop string."""
        if not count:
            return
        del self.request.output_token_ids[-count:]
        if self.logprobs is not None:
            del self.logprobs[-count:]
            of = zip(self.request.output_token_ids, self.logprobs, strict=True)
            self.cumulative_logprob = sum((entry[token].logprob for token, entry in of), 0.0)

    def _add_text(self, new: str, search: bool) -> str | None:
        if not new:
            return None
        begin = len(self.text)
        self.text += new
        found = find_stop(self.text, begin, self.stops) if search else None
        if found is None:
            return None
        place, stop = found
        keep = len(stop) if self.request.sampling_params.include_stop_str_in_output else 0
        self.text = self.text[: place + keep]
        return stop

    def _take_logprobs(self, output: EngineCoreOutput) -> None:
        if self.logprobs is None:
            self.logprobs, self.cumulative_logprob = [], 0.0
        entries = self._with_texts(dict(enumerate(output.new_logprobs or ())))
        for token, entry in zip(output.new_token_ids, entries.values(), strict=False):
            self.logprobs.append(entry)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + entry[token].logprob

    def _with_texts(self, entries: dict[int, dict[int, Logprob]]) -> dict[int, dict[int, Logprob]]:
        """The same entries with decoded_token filled in."""
        if self.tokenizer is not None:
            text_of = self.tokenizer.token_text
            for entry in entries.values():
                for token, logprob in entry.items():
                    logprob.decoded_token = text_of(token)
        return entries

    # ------------------------------------------------------------------------------------------------------ results
    def completion(self) -> CompletionOutput:
        """The output so far; a stream sees no text that a stop string may still take back."""
        held = 0
        if self.stops and self.finish_reason is None and not self.request.sampling_params.include_stop_str_in_output:
            held = held_back(self.text, self.stops)
        return CompletionOutput(
            index=self.index,
            text=self.text[: len(self.text) - held],
            token_ids=list(self.request.output_token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=self._label_logprobs() if self._wants_label_logprobs else None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    @property
    def _wants_label_logprobs(self) -> bool:
        """logprob_token_ids with max_tokens=0: the distribution after the prompt, restricted to those ids."""
        return self.request.sampling_params.max_tokens == 0 and self.request.label_token_ids is not None

    def _label_logprobs(self) -> list[dict[int, Logprob]]:
        ids = self.request.label_token_ids or ()
        entries = {
            row: {token: Logprob(value - (total or 0.0)) for token, value in zip(ids, values, strict=True)}
            for row, (values, total) in self.label_logits.items()
        }
        return list(self._with_texts(entries).values())

    def all_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.request.sampling_params.prompt_logprobs is None:
            return None
        return [self.prompt_logprobs.get(at) for at in range(self.request.num_prompt_tokens)]


class OutputProcessor:
    """Open requests by id, and the outputs their callers get. A completion does not know its group: prompts of finished requests would
    wait in the circle for the garbage collector, which looks at every id of them (6 ms for 400 prompts of 1,024 tokens)."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.groups: dict[str, RequestGroup] = {}
        self.states: dict[str, tuple[CompletionState, RequestGroup]] = {}

    def add(self, group: RequestGroup, requests: Sequence[Request]) -> None:
        self.groups[group.request_id] = group
        group.unfinished = len(requests)
        for index, request in enumerate(requests):
            state = CompletionState(request, group.stream, index, self.tokenizer)
            group.members.append(state)
            self.states[request.request_id] = state, group

    def process(self, outputs: Iterable[EngineCoreOutput]) -> tuple[list[RequestOutput], list[tuple[str, str]]]:
        """Returns what callers get now, and (request id, stop string) of requests to be ended by the scheduler."""
        ended: list[tuple[str, str]] = []
        touched: dict[str, RequestGroup] = {}
        for output in outputs:
            request_id = output.request.request_id
            if request_id not in self.states:
                continue
            state, group = self.states[request_id]
            stop = state.take(output)
            if stop is not None and output.finish_reason is None:
                ended.append((request_id, stop))
            if state.finish_reason is not None:
                self._close(state)
            if group.stream or not group.unfinished:
                touched[group.request_id] = group
        return [self.request_output(group) for group in touched.values()], ended

    def _close(self, state: CompletionState) -> None:
        _, group = self.states.pop(state.request.request_id)
        group.unfinished -= 1
        if not group.unfinished:
            del self.groups[group.request_id]

    def abort(self, request_id: str) -> tuple[list[str], RequestOutput | None]:
        """Close a group. Returns the ids of its unfinished requests and its last output; ([], None) if it is unknown."""
        group = self.groups.get(request_id)
        if group is None:
            return [], None
        open_states = [state for state in group.members if state.finish_reason is None]
        for state in open_states:
            state.take(EngineCoreOutput(state.request, finish_reason=FinishReason.ABORT))
            self._close(state)
        return [state.request.request_id for state in open_states], self.request_output(group)

    def request_output(self, group: RequestGroup) -> RequestOutput:
        first = group.members[0]
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=first.request.prompt_token_ids,
            outputs=[state.completion() for state in group.members],
            finished=group.unfinished == 0,
            prompt_logprobs=first.all_prompt_logprobs(),
            num_cached_tokens=first.request.num_cached_tokens,
            metrics=first.request.metrics,
            label_logits=first.label_logits or None,
        )


def find_stop(text: str, begin: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """The first stop string in `text` that ends after `begin`: (its place, the string). The earliest place wins."""
    found = [(place, stop) for stop in stops if (place := text.find(stop, max(0, begin - len(stop) + 1))) >= 0]
    return min(found, key=lambda hit: hit[0], default=None)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = max(len(stop) for stop in stops) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[len(text) - length :]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0
