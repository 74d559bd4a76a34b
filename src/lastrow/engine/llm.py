"""LLM: the offline API. Names, arguments and results are vLLM's."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lastrow.config import EngineConfig
from lastrow.core.output import RequestOutput
from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.build import build_engine
from lastrow.models.config import ConfigError
from lastrow.progress import track
from lastrow.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lastrow.decisions.api import Decider

Prompt = str | Mapping[str, Any] | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]


TEXTS_AT_ONCE = 32  # 1,024 tokens take a core 0.7 ms, so these few cores a few ms, less than a card takes for what they bring
LAUNCH_TOKENS, LAUNCH_PROMPTS = 4096, 8
"""A first step of this many tokens, a captured size, runs for as long as some sixty further prompts take to prepare (8 ms on an H200 and
its host). Where no more prompts than this are left it does not pay: two steps read the weights twice."""


class LLM:
    """A model ready to generate.

    model: a folder, a hub id, or `tiny-e`. options: fields of `lastrow.config.EngineConfig`. A request ends at the model's stop
    ids: those of generation_config and 1, 106, 50. Calls and streams may take turns, in one thread or in several.
    Raises ConfigError, TokenizerError or WeightsError with the reason."""

    def __init__(self, model: str = "tiny-e", **options: Any) -> None:
        try:
            self.config = EngineConfig(model=model, **options)
        except TypeError as error:
            raise ConfigError(f"{error}; see lastrow.config.EngineConfig for the options") from None
        self.engine = build_engine(self.config)
        gc.collect()
        gc.freeze()  # weights and libraries stay; looking through them again would stop a step for tens of milliseconds
        self._ids = itertools.count()

    # ------------------------------------------------------------------------------------------------------ generation
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; results are in the prompts' order.

        A prompt is a text (one <bos> is put in front), {"prompt_token_ids": [...]}, {"prompt": text} or a list of token ids. A mapping may
        bring a "cache_salt": only prompts with the same one share cached K/V.
        sampling_params: one for all or one per prompt; None: `get_default_sampling_params()`. use_tqdm: show progress on a
        terminal. Raises ValueError naming the prompt that cannot be run; then none is."""
        items = [prompts] if _is_prompt(prompts) or not isinstance(prompts, Iterable) else list(prompts)
        params = self._params(sampling_params, len(items))
        order = [0] * len(items) if priority is None else list(priority)
        if len(order) != len(items):
            raise ValueError(f"priority has {len(order)} entries for {len(items)} prompts")
        ids: list[str] = []
        try:
            waiting = 0
            for i, (item, (text, tokens), p, rank) in enumerate(zip(items, self._tokens(items), params, order, strict=True)):
                request_id = str(next(self._ids))
                self.engine.add_request(
                    request_id, tokens, p, prompt=text, priority=rank, cache_salt=_salt(item), is_kept=True,
                    same_params=i > 0 and p is params[i - 1],
                )  # fmt: skip
                ids.append(request_id)
                waiting += len(tokens) - 1  # a step that is launched ahead leaves the last one
                if waiting >= LAUNCH_TOKENS and len(items) - i > LAUNCH_PROMPTS:
                    # the card starts while the other prompts are being prepared; a first step that fills its graph leaves the sum of
                    # both as it was
                    self.engine.launch_ahead(max_tokens=LAUNCH_TOKENS)
            finished = self._run(ids)
            done = {out.request_id: out for out in (track(finished, "generating", total=len(ids)) if use_tqdm else finished)}
        except BaseException:
            self.engine.abort(ids)
            raise
        return [done[request_id] for request_id in ids]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. messages, tools: the OpenAI form. chat_template_kwargs: for the template, such as
        enable_thinking=True. sampling_params None: the defaults, up to the end of the model's turn."""
        many = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        if sampling_params is None:
            sampling_params = replace(self.get_default_sampling_params(), max_tokens=None)
        prompts = [self._render(m, tools, chat_template, chat_template_kwargs, add_generation_prompt, continue_final_message) for m in many]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield the growing output of one prompt or conversation, whole each time; closing the iterator aborts the request."""
        if _is_prompt(prompt):
            item: Any = prompt
        else:
            item = self._render(prompt, tools, None, chat_template_kwargs, True, False)
            sampling_params = sampling_params or replace(self.get_default_sampling_params(), max_tokens=None)
        ((text, tokens),) = self._tokens([item])
        request_id = str(next(self._ids))
        params = self._params(sampling_params, 1)[0]
        self.engine.add_request(request_id, tokens, params, prompt=text, stream=True, cache_salt=_salt(prompt))
        outputs = self._follow(request_id)
        next(outputs)
        return outputs

    # ------------------------------------------------------------------------------------------------------ prefill only
    def decide(self, state: Any, questions: Any, *, use_tqdm: bool = True, output: str | Path | None = None, **options: Any) -> Any:
        """Probability of every allowed answer to every question about a state: lastrow.decisions.DecisionOutput.

        state: a text, JSON data (a mapping), a list of those (then the results are a list), or another iterable of them (then an
        iterator that keeps only what is running in memory). questions: see `decisions.questions.parse_questions`. options: those of
        `decisions.api.Decider.question_set` (label_mass, diagnostics, truncate, calibration, instructions, prompt_template, ...).
        output: a .jsonl file that grows as states are done; a run over the same states goes on behind its last line. A single state's
        error is raised; one among many is in its output's `error`."""
        from lastrow.decisions.api import decide

        return decide(self.decider, state, questions, use_tqdm, output, options)

    def score(self, prompt: Any, choices: Any = None, *, use_tqdm: bool = True, output: str | Path | None = None) -> Any:
        """Log probability of each choice behind a prompt, exact for choices of any number of tokens: lastrow.decisions.ScoreOutput.

        prompt: a text or token ids, or a list or iterable of them, with one list of choices for all; with choices=None the items are
        (prompt, choices). The texts are put behind one another as they are. Errors and output as in `decide`."""
        from lastrow.decisions.api import score

        return score(self.decider, prompt, choices, use_tqdm, output)

    def loglikelihood(self, pairs: Any, *, use_tqdm: bool = True, output: str | Path | None = None) -> Any:
        """(context, continuation) pairs, texts or token ids, in a list or an iterable -> lastrow.decisions.Loglikelihood of each, as
        lm-eval defines it. Neighbours with the same context share it. output: as in `decide`. Raises ValueError."""
        from lastrow.decisions.api import loglikelihood

        return loglikelihood(self.decider, pairs, use_tqdm, output)

    def rank(
        self,
        query: Any,
        documents: Iterable[str] | None = None,
        *,
        top_n: int | None = None,
        instructions: str | None = None,
        prompt_template: str | Path | None = None,
        use_tqdm: bool = True,
        output: str | Path | None = None,
    ) -> Any:
        """Documents by the probability that they answer the query, most relevant first: a list of lastrow.decisions.Ranked.

        query: a text, or a list or iterable of them, with one list of documents for all; with documents=None the items are (query,
        documents). Each of several gets a lastrow.decisions.RankOutput, whose `results` is that list. Each query is computed once (once
        for every 64 documents). Errors and output as in `decide`; a template or instructions that cannot be used raise at once."""
        from lastrow.decisions.api import rank

        return rank(self.decider, query, documents, top_n, instructions, prompt_template, use_tqdm, output)

    @cached_property
    def decider(self) -> Decider:
        """What `decide`, `score`, `loglikelihood` and `rank` work with; its question_set makes questions ready once for many calls."""
        from lastrow.decisions.api import Decider

        return Decider(self.engine)

    def _follow(self, request_id: str) -> Iterator[RequestOutput]:
        """The outputs of one request, behind a None that starts the generator: dropping it then ends the request in any case."""
        try:
            yield cast("RequestOutput", None)
            while self.engine.is_open(request_id):
                yield from self.engine.step_for({request_id})
        finally:
            self.engine.abort(request_id)

    def _run(self, ids: Iterable[str]) -> Iterator[RequestOutput]:
        left = set(ids)
        while left:
            finished = [output for output in self.engine.step_for(left) if output.finished]
            left.difference_update(output.request_id for output in finished)
            yield from finished
            if left and not finished and not any(map(self.engine.is_open, left)):
                raise RuntimeError(f"{len(left)} requests were ended from outside this call, by shutdown()")

    # ------------------------------------------------------------------------------------------------------ around it
    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises ConfigError where there is none (a named shape with dummy weights)."""
        if self.engine.tokenizer is None:
            raise ConfigError(f"shape {self.config.shape!r} has dummy weights and no tokenizer: give prompt_token_ids")
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What generation_config.json says (Gemma 4: temperature 1.0, top_k 64, top_p 0.95), used when no parameters are given."""
        known = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        source = {} if self.engine.tokenizer is None else self.engine.tokenizer.generation_config
        values = {name: source[name] for name in known if source.get(name) is not None}
        if source.get("do_sample") is False:
            values["temperature"] = 0.0
        return SamplingParams(**values)

    def cache_status(self) -> dict[str, Any]:
        """Blocks by group, prefix hits, formats, and who owns K/V and who reads it: the document of GET /v1/cache/status."""
        return self.engine.cache_status()

    def reset_prefix_cache(self) -> None:
        """Forget the K/V of finished requests."""
        self.engine.reset_prefix_cache()

    def rebuild_cache(self, kv_cache_memory_bytes: int) -> None:
        """Another size for the K/V pool, whose content is lost. Raises ConfigError for a size that does not fit; the old one stays."""
        self.engine.rebuild_cache(kv_cache_memory_bytes)

    def shutdown(self) -> None:
        """End all requests. The memory goes when the object does."""
        self.engine.abort(list(self.engine.outputs.groups))

    def _render(
        self, messages: Any, tools: Any, template: str | None, kwargs: Mapping[str, Any] | None, generation_prompt: bool, go_on: bool
    ) -> dict[str, Any]:
        text = self.get_tokenizer().apply_chat_template(
            messages, tools=tools, add_generation_prompt=generation_prompt, continue_final_message=go_on, tokenize=False,
            chat_template=template, **(kwargs or {}),
        )  # fmt: skip
        return {"prompt": text}

    def _tokens(self, prompts: Sequence[Any]) -> Iterator[tuple[str | None, Sequence[int]]]:
        """Text (if any) and token ids of each prompt. Some texts at a time: a card works on these while the others are encoded."""
        for first in range(0, len(prompts), TEXTS_AT_ONCE):
            some = [_text_and_ids(prompt) for prompt in prompts[first : first + TEXTS_AT_ONCE]]
            texts = [text for text, ids in some if text is not None and ids is None]
            encoded = iter(self.get_tokenizer().encode_batch(texts) if texts else ())
            for text, ids in some:
                yield text, next(encoded) if ids is None else ids

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if isinstance(params, Mapping) or not all(isinstance(item, SamplingParams) for item in params):
            raise ValueError(f"sampling_params is {params!r}: a SamplingParams or a list of them is needed")
        if len(params) != count:
            raise ValueError(f"sampling_params has {len(params)} entries for {count} prompts: give one, or one per prompt")
        return list(params)


def _text_and_ids(prompt: Any) -> tuple[str | None, Sequence[int] | None]:
    """What a prompt brings: one of the two at least."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        if isinstance(prompt.get("prompt_token_ids"), (list, Sequence, np.ndarray)):  # a list first: an abstract class takes longer
            return prompt.get("prompt"), prompt["prompt_token_ids"]
        if isinstance(prompt.get("prompt"), str):
            return prompt["prompt"], None
        raise ValueError(f"a prompt is {prompt!r}: {{'prompt_token_ids': [...]}} or {{'prompt': text}} is needed")
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        return None, prompt
    raise ValueError(f"a prompt is a {type(prompt).__name__}: a text, a list of token ids or {{'prompt_token_ids': [...]}} is needed")


def _salt(prompt: Any) -> str | None:
    """cache_salt of a prompt given as a mapping. Raises ValueError where it is no text."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and not isinstance(salt, str):
        raise ValueError(f"cache_salt is {salt!r}: a text is needed")
    return salt


def _is_prompt(prompts: Any) -> bool:
    """One prompt, not a list of them: a text, a mapping, or a flat list of integers."""
    return isinstance(prompts, str | Mapping) or (isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int))
