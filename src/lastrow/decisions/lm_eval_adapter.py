"""lm-eval's model `lastrow`: log likelihoods at prefill speed (a context's choices share it) and greedy generation.

lm-eval 0.4.13 knows models by its own table only: `python -m lastrow.decisions.lm_eval_adapter ARGUMENTS` is its command line with
this one added; from Python, `lm_eval.simple_evaluate(model=LastrowLM(...))`. The entry point (group lm_eval.models) is for versions that
look. A window of N tokens scores N - 1 of them: lm-eval's `hf` with max_length=N - 1 does the same."""

from __future__ import annotations

# lm-eval is the extra `eval`; lint runs without it
# pyright: reportMissingImports=false
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.model import LM

import lastrow
from lastrow.core.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 256
LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class LastrowLM(LM):
    """model (or pretrained, lm-eval's usual name): a folder, hub id or tiny-e. options: fields of EngineConfig. batch_size and device
    strings of lm-eval's are understood; the engine batches by itself."""

    def __init__(self, model: str = "", pretrained: str = "", batch_size: Any = None, max_batch_size: Any = None, **options: Any) -> None:
        super().__init__()
        if options.get("device") is None or str(options["device"]).startswith("cuda"):
            options["device"] = "auto"  # lm-eval says cuda where nobody said anything
        self.llm = lastrow.LLM(model or pretrained or "tiny-e", **options)
        self.tokenizer = self.llm.get_tokenizer()
        self.max_length = self.llm.engine.scheduler.config.max_model_len

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Source of the template, which lm-eval puts into its cache keys."""
        return self.tokenizer.chat_template_source if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt, tokenize=False
        )

    # -------------------------------------------------------------------------------------------------- log likelihoods
    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = (self._fitting(*self._pair(*request.args)) for request in requests)
        results = [(r.logprob, r.is_greedy) for r in self.llm.loglikelihood(pairs)]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The whole text behind <bos>, in windows that do not overlap in what they score, each with as much context as fits."""
        windows = [list(self._windows(request.args[0])) for request in requests]
        logs: Iterator[Any] = iter(self.llm.loglikelihood(pair for some in windows for pair in some))
        results = [math.fsum(next(logs).logprob for _ in some) for some in windows]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return results

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if context:
            return self.llm.decider.continuation_tokens((context, continuation))
        return [self.tokenizer.bos_token_id], self.tokenizer.encode(continuation, add_bos=False)

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """A context that is too long loses its beginning."""
        room = self.max_length - len(continuation)
        return (context if len(context) <= room else context[len(context) - max(room, 1) :]), continuation

    def _windows(self, text: str) -> Iterable[tuple[list[int], list[int]]]:
        ids = self.tokenizer.encode(text, add_bos=False)
        rolling = utils.get_rolling_token_windows(ids, self.tokenizer.bos_token_id, self.max_length - 1, 1)
        return map(utils.make_disjoint_window, rolling)

    # -------------------------------------------------------------------------------------------------- generation
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        prompts = [self._prompt(request.args[0], self._length(request.args[1])) for request in requests]
        params = [self._params(request.args[1]) for request in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        texts = [output.outputs[0].text for output in outputs]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _prompt(self, context: str, max_tokens: int) -> list[int]:
        ids = self.tokenizer.encode(context)
        room = max(1, self.max_length - max_tokens)
        return ids if len(ids) <= room else [ids[0], *ids[len(ids) - room + 1 :]]

    def _length(self, kwargs: dict[str, Any]) -> int:
        return next((int(kwargs[name]) for name in LENGTH_NAMES if kwargs.get(name) is not None), DEFAULT_MAX_TOKENS)

    def _params(self, kwargs: dict[str, Any]) -> SamplingParams:
        until = kwargs.get("until") or []
        sampled = bool(kwargs.get("do_sample")) and kwargs.get("temperature", 1.0) > 0
        return SamplingParams(
            max_tokens=self._length(kwargs),
            stop=[until] if isinstance(until, str) else [text for text in until if text],
            temperature=float(kwargs.get("temperature", 1.0)) if sampled else 0.0,
            top_p=float(kwargs.get("top_p", 1.0)) if sampled else 1.0,
        )


def main() -> None:
    """lm-eval's command line with `--model lastrow`."""
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    model_registry.register("lastrow", target="lastrow.decisions.lm_eval_adapter:LastrowLM")
    cli_evaluate()


if __name__ == "__main__":
    main()
