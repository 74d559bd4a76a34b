"""Text to token ids and back, with the checkpoint's own tokenizer and chat template. transformers is not needed.

Source: spec section 6. The template is rendered as transformers renders it (tests compare byte by byte); its environment is in
`chat_template.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from lastrow.chat_template import ChatTemplate, TokenizerError, normalize_messages

__all__ = ["IncrementalDetokenizer", "Tokenizer", "TokenizerError"]

STOP_IDS = frozenset({1, 106, 50})
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SPECIAL_TOKENS = {
    "bos": "<bos>",
    "pad": "<pad>",
    "turn_start": "<|turn>",
    "turn_end": "<turn|>",
    "channel_start": "<|channel>",
    "channel_end": "<channel|>",
    "tool_start": "<|tool>",
    "tool_end": "<tool|>",
    "tool_call_start": "<|tool_call>",
    "tool_call_end": "<tool_call|>",
    "tool_response_start": "<|tool_response>",
    "tool_response_end": "<tool_response|>",
    "quote": '<|"|>',
    "think": "<|think|>",
}
LONG_TEXT = 2_000  # characters that take 0.6 ms to encode: what serves others meanwhile does it in a thread
CACHED_TEXTS = 1000
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Decoders under which a text is the concatenation of its tokens' texts, byte tokens apart. Gemma's is exactly these three.
CONCATENATIVE_DECODERS = {"Replace", "ByteFallback", "Fuse"}


class Tokenizer:
    """Tokenizer of one checkpoint folder.

    path: folder with tokenizer.json and tokenizer_config.json; optional: special_tokens_map.json, chat_template.jinja,
    generation_config.json.

    bos_token, bos_token_id: its text and id. eos_token_ids: every id that ends an answer, the union of generation_config.json's and
    {1, 106, 50}.
    special_ids: name -> id for those of SPECIAL_TOKENS that the vocabulary has. added_tokens: texts found before any merge, special or
    not. max_token_chars: the longest token's text, so that a text of n characters has at least n / max_token_chars tokens.
    Raises TokenizerError."""

    def __init__(self, path: str | Path) -> None:
        import tokenizers

        self.path = Path(path)
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{file}: no such file; a checkpoint folder holds tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{file}: not readable as a tokenizer ({error})") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # The library keeps the tokens of each of the first 10,000 texts (5 KiB each), and Gemma's pre-tokenizer makes one text of all
        # between two special tokens: 50 MB of a server for texts that do not come again.
        self._tokenizer.model._resize_cache(CACHED_TEXTS)
        config = _read_json(self.path / "tokenizer_config.json")
        self.special_tokens_map = _special_tokens_map({**_read_json(self.path / "special_tokens_map.json", optional=True), **config})
        self._templates = _templates(self.path, config)
        self._check_decoder(file)

        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.special_ids = {name: i for name, text in SPECIAL_TOKENS.items() if (i := self._tokenizer.token_to_id(text)) is not None}
        self.bos_token = self.special_tokens_map.get("bos_token", SPECIAL_TOKENS["bos"])
        bos = self._tokenizer.token_to_id(self.bos_token)
        if bos is None:
            raise TokenizerError(f"{file}: the vocabulary has no <bos>, and Gemma 4 degrades without it")
        self.bos_token_id: int = bos
        self._tokenizer.encode_special_tokens = True
        self._spelled_bos: list[int] = [i for i in self._tokenizer.encode(self.bos_token, add_special_tokens=False).ids if i != bos]
        self._tokenizer.encode_special_tokens = False
        generation = _read_json(self.path / "generation_config.json", optional=True)
        self.generation_config = generation
        self.eos_token_ids = STOP_IDS | _ids(generation.get("eos_token_id"), self.path / "generation_config.json")
        added = self._tokenizer.get_added_tokens_decoder()
        self.all_special_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_tokens = tuple(token.content for token in added.values())
        self._bytes = {i: b for b in range(256) if (i := self._tokenizer.token_to_id(f"<0x{b:02X}>")) is not None}
        self._texts: dict[int, str | None] = {}
        self.max_token_chars = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    def _check_decoder(self, file: Path) -> None:
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        kinds = [part["type"] for part in decoder.get("decoders", [decoder]) if "type" in part]
        if set(kinds) - CONCATENATIVE_DECODERS or "ByteFallback" not in kinds:
            raise TokenizerError(f"{file}: decoder {kinds}; Gemma 4's is ['Replace', 'ByteFallback', 'Fuse'] and lastrow reads no other")

    # ---------------------------------------------------------------------------------------------- text <-> ids
    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of `text`. add_bos: the result begins with exactly one <bos>, also when the text itself begins with some; else it has
        none. A <bos> anywhere else was typed, in a chat message for instance, and is spelled out in ordinary tokens. Other control tokens
        are themselves wherever they stand, as in transformers and vLLM.

        Raises TokenizerError for text that is no Unicode (a lone surrogate)."""
        return self.encode_batch([text], add_bos)[0]

    def encode_batch(self, texts: Sequence[str], add_bos: bool = True) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        readable = [self.without_bos(_unicode(text)) if add_bos else _unicode(text) for text in texts]
        # a batch of one, too: it took 0.6 to 0.9 of the library's encode() for 200 to 20,000 characters, and leaves Python's lock to others
        many = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(readable, add_special_tokens=False)]
        for i, ids in enumerate(many):
            if self.bos_token_id in ids:
                many[i] = [part for token in ids for part in (self._spelled_bos if token == self.bos_token_id else (token,))]
        return [[self.bos_token_id, *ids] for ids in many] if add_bos else many

    def without_bos(self, text: str) -> str:
        """`text` without the <bos> (or several) that it begins with."""
        begin = 0
        while text.startswith(self.bos_token, begin):
            begin += len(self.bos_token)
        return text[begin:]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Byte tokens that form no UTF-8 become U+FFFD; ids outside the vocabulary have no text."""
        try:
            if len(ids) < LONG_TEXT:  # a batch does not hold Python's lock meanwhile, and takes longer to start
                return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        except (OverflowError, TypeError) as error:
            raise TokenizerError(f"ids cannot be decoded ({error}): integers from 0 to {self.vocab_size - 1} are needed") from None

    def token_text(self, token: int) -> str | None:
        """Text of one token, specials included; U+FFFD for a byte above 127, None outside the vocabulary."""
        if token not in self._texts:
            known = self._tokenizer.id_to_token(token) is not None if 0 <= token < 2**32 else False
            self._texts[token] = self.decode([token], skip_special_tokens=False) if known else None
        return self._texts[token]

    def token_byte(self, token: int) -> int | None:
        """The byte that a byte-fallback token stands for; None for every other token."""
        return self._bytes.get(token)

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes of one token (the `bytes` of OpenAI's logprobs)."""
        byte = self._bytes.get(token)
        return (self.token_text(token) or "").encode() if byte is None else bytes([byte])

    # ---------------------------------------------------------------------------------------------- chat
    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def chat_template_source(self) -> str:
        """Jinja source of the template for conversations without tools; empty where there is none."""
        return self._templates.get("default", "")

    @overload
    def apply_chat_template(self, messages: Sequence[Any], *args: Any, tokenize: Literal[True] = True, **kwargs: Any) -> list[int]: ...

    @overload
    def apply_chat_template(self, messages: Sequence[Any], *args: Any, tokenize: Literal[False], **kwargs: Any) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        enable_thinking: bool = False,
        tokenize: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> list[int] | str:
        """Render a conversation in the OpenAI form and tokenize it.

        messages: dicts (or pydantic models) with role and content, a string or a list of {"type": "text", "text": ...} parts;
        tool_calls' arguments may be an object or its JSON. tools: OpenAI tool definitions. continue_final_message: leave the last
        message open and write no generation prompt. chat_template: jinja source to use in place of the checkpoint's. kwargs go to
        the template. Returns ids (one <bos>, which the template writes), or the text with tokenize=False.

        Raises TokenizerError: no template, no messages, a message of the wrong form, or what the template itself refuses."""
        template = ChatTemplate(chat_template) if chat_template is not None else self._template(bool(tools))
        text = template.render(
            normalize_messages(messages),
            tools=tools,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            **{**self.special_tokens_map, "enable_thinking": enable_thinking, **kwargs},
        )
        return self.encode(text) if tokenize else text

    def _template(self, with_tools: bool) -> ChatTemplate:
        source = (self._templates.get("tool_use") if with_tools else None) or self._templates.get("default")
        if source is None:
            raise TokenizerError(
                f"{self.path}: no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
                "use generate() with plain prompts or pass chat_template"
            )
        return ChatTemplate(source)


class IncrementalDetokenizer:
    """Text of one request's output as it grows; what was handed out is never taken back.

    A byte token alone may be half a character, and one wrong byte turns the whole run of byte tokens around it into U+FFFD, so a
    run is held back until a token with text ends it. The concatenation of all `append` results and `flush` is
    `tokenizer.decode(ids, skip_special_tokens)`. prompt_ids: a character begun by the prompt's last byte tokens is finished by the
    first ones of the output. O(1) amortised per token."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.all_special_ids if skip_special_tokens else frozenset[int]()
        self._run = bytearray(_unfinished(tokenizer, prompt_ids))
        self._carried = len(self._run)

    def append(self, ids: Iterable[int]) -> str:
        """Take further output ids; return the text that is now certain."""
        new: list[str] = []
        for token in ids:
            if token in self._skipped:
                continue
            byte = self._tokenizer.token_byte(token)
            if byte is not None:
                self._run.append(byte)
                continue
            text = self._tokenizer.token_text(token)
            if text is not None:
                new.append(self.flush())
                new.append(text)
        return "".join(new)

    def flush(self) -> str:
        """The text held back, at the end of the output."""
        run, carried = bytes(self._run), self._carried
        self._run.clear()
        self._carried = 0
        if len(run) == carried:
            return ""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * (len(run) - carried)


def _unfinished(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bytes:
    """The bytes at the end of the prompt that begin a UTF-8 character and do not finish it (at most 3)."""
    tail: list[int] = []
    for token in reversed(prompt_ids[-3:]):
        byte = tokenizer.token_byte(token)
        if byte is None:
            break
        tail.insert(0, byte)
        if byte >= 0xC0:  # a leading byte: it says how many follow
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return bytes(tail) if len(tail) < length else b""
    return b""


# -------------------------------------------------------------------------------------------------- files
def _read_json(file: Path, optional: bool = False) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise TokenizerError(f"{file}: no such file; a checkpoint folder holds {file.name}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TokenizerError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(data, dict):
        raise TokenizerError(f"{file}: holds a {type(data).__name__}, a JSON object is needed")
    return data


def _special_tokens_map(config: Mapping[str, Any]) -> dict[str, str]:
    values = {name: config[name] for name in NAMED_TOKENS if config.get(name) is not None}
    return {name: str(value["content"] if isinstance(value, Mapping) else value) for name, value in values.items()}


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template sources by name. The file wins over tokenizer_config.json, as in transformers."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return {"default": file.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{file}: not readable ({error})") from None
    source = config.get("chat_template")
    if isinstance(source, str):
        return {"default": source}
    try:
        return {entry["name"]: entry["template"] for entry in source or []}
    except (TypeError, KeyError):
        raise TokenizerError(f"{path / 'tokenizer_config.json'}: chat_template is neither a text nor a list of named texts") from None


def _ids(value: Any, file: Path) -> frozenset[int]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) for i in values):
        raise TokenizerError(f"{file}: eos_token_id is {value!r}; an id or a list of ids is needed")
    return frozenset(values)


def _unicode(text: str) -> str:
    """Surrogate pairs (from JSON written with escapes and read by halves) joined; lone surrogates refused."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            code = ord(text[error.start])
            raise TokenizerError(f"character {error.start} of the text is a lone surrogate (U+{code:04X}): no Unicode text") from None
    except AttributeError:
        raise TokenizerError(f"a text is needed, not a {type(text).__name__}") from None
    return text
