"""Requests as OpenAI's API and vLLM's extensions name them. Unknown fields are ignored with a warning, as vLLM does.

A field that is None was not given: the default is the model's generation_config.json, then SamplingParams'."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.structured_output import StructuredOutputsParams

logger = logging.getLogger("lastrow.server")

# Fields that clients send and that mean nothing here: no state is kept, one tier, no user accounts.
HARMLESS = frozenset({"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "modalities", "truncation"})
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_warned: set[str] = set()


def _unicode(text: str) -> str:
    if (wrong := next((c for c in text if "\ud800" <= c <= "\udfff"), None)) is not None:
        raise ValueError(f"U+{ord(wrong):04X} is a lone surrogate, no Unicode text")
    return text


# What goes to the engine process in a message: integers of 64 bits, texts that are Unicode.
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Text = Annotated[str, AfterValidator(_unicode)]
# Long lists. Only the first mistake is told; to find every one took 3 s for 400,000 ids and a text, of everybody's time.
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


def what_is_wrong(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """(message, field) of a validation's errors: the first one, and where a field may hold several kinds, what each of them is."""
    first = errors[0]
    place = [str(part) for part in first["loc"]]
    if not place:
        return "the body is empty or holds no JSON object", None
    name = _field(place)
    messages = [str(e["msg"]) for e in errors if _field([str(part) for part in e["loc"]]) == name]
    return f"{name}: {' / '.join(dict.fromkeys(messages))}", name


def _field(place: list[str]) -> str:
    """The path of a field without the kinds that pydantic puts behind it for a union (`prompt.list[int].0`)."""
    kind = next((i for i, part in enumerate(place) if i and (part in ("str", "int", "float", "bool") or "[" in part)), len(place))
    return ".".join(place[:kind])


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: int | str | None = None


class ErrorResponse(BaseModel):
    """What every error looks like: OpenAI's envelope."""

    error: ErrorInfo


class Request(BaseModel):
    model_config = ConfigDict(extra="allow", strict=False)

    @model_validator(mode="after")
    def _warn_of_unknown(self) -> Request:
        for name in self.model_extra or ():
            short = repr(name)[:80]
            if name not in HARMLESS and short not in _warned and len(_warned) < 1000:
                _warned.add(short)
                logger.warning("field %s of a %s is not known and ignored", short, type(self).__name__)
        return self


class StreamOptions(Request):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Request):
    """What completions and chat completions share. Meanings and limits: SamplingParams."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=128)
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: Ids | None = None
    bad_words: list[Text] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    min_tokens: Int64 | None = None
    max_tokens: Int64 | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    priority: Int64 | None = None
    request_id: str | None = Field(None, max_length=128)
    cache_salt: str | None = Field(None, max_length=256)
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Older names of structured_outputs' members.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    SAMPLING: ClassVar[tuple[str, ...]] = (
        "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop",
        "stop_token_ids", "bad_words", "allowed_token_ids", "ignore_eos", "min_tokens", "prompt_logprobs", "logprob_token_ids",
        "include_stop_str_in_output", "skip_special_tokens",
    )  # fmt: skip

    def sampling_params(self, defaults: Mapping[str, Any], **fixed: Any) -> SamplingParams:
        """Raises ValueError naming the field. defaults: of generation_config; fixed: what the endpoint decides."""
        values = {name: value for name, value in defaults.items() if name in DEFAULTS}
        values |= {name: value for name in self.SAMPLING if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            values["logit_bias"] = _logit_bias(self.logit_bias)
        return SamplingParams(**{**values, **fixed})

    def constraint(self) -> dict[str, Any]:
        """structured_outputs, the guided_* names and response_format as fields of StructuredOutputsParams; empty for none.

        Raises ValueError when more than one is given."""
        given = {name: getattr(self, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
        found: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.structured_outputs:
            found |= {name: value for name, value in self.structured_outputs.items() if value is not None}
        found |= _response_format(self.response_format)
        if found:
            StructuredOutputsParams.of(found)
        return found


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    made: dict[int, float] = {}
    for token, value in bias.items():
        try:
            made[int(token)] = value
        except ValueError:
            raise ValueError(f"logit_bias has the key {token!r}: token ids are needed") from None
    return made


def _response_format(value: dict[str, Any] | None) -> dict[str, Any]:
    """OpenAI's response_format (chat) or text.format (responses), whose json_schema may be nested or flat."""
    if value is None or value.get("type") == "text":
        return {}
    if value.get("type") == "json_object":
        return {"json_object": True}
    if value.get("type") == "json_schema":
        inner = value.get("json_schema") if isinstance(value.get("json_schema"), dict) else value
        schema = (inner or {}).get("schema")
        if not isinstance(schema, dict):
            raise ValueError("response_format of type json_schema needs json_schema.schema, an object")
        return {"json": schema}
    raise ValueError(f"response_format.type is {value.get('type')!r}: text, json_object or json_schema is needed")


class CompletionRequest(SamplingFields):
    prompt: str | Ids | Texts | Annotated[list[Ids], Field(fail_fast=True)]
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class FunctionDefinition(Request):
    name: str = Field(min_length=1, max_length=256, pattern=r"^[^\s{}:,\"'<>|]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Request):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class ChatFields(SamplingFields):
    """What decides the prompt of a chat."""

    messages: list[dict[str, Any]]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatCompletionRequest(ChatFields):
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class ResponsesRequest(Request):
    """OpenAI's Responses API without state: previous_response_id, background and prompt templates are refused."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: Int64 | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    # Ours, as in chat completions.
    top_k: Int64 | None = None
    seed: int | None = None
    stop: Text | list[Text] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Int64 | None = None
    cache_salt: str | None = Field(None, max_length=256)


class TokenizeRequest(Request):
    """prompt, or messages with the fields of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Request):
    model: str | None = None
    tokens: Ids
