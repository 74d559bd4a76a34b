"""Encoding, decoding and incremental text against the `tokenizers` library and transformers."""

from __future__ import annotations

import ctypes
import json
import shutil
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing

from conftest import TINY_E
from lastrow.tokenizer import IncrementalDetokenizer, Tokenizer, TokenizerError

OURS = Tokenizer(TINY_E)
LIBRARY = Library.from_file(str(TINY_E / "tokenizer.json"))
BYTES = [LIBRARY.token_to_id(f"<0x{b:02X}>") for b in range(256)]
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)


def without_weights(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_E, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors")))


# ------------------------------------------------------------------------------------------------ encode, decode
@given(TEXT)
def test_encode_is_one_bos_and_then_the_library(text: str) -> None:
    ids = LIBRARY.encode(text, add_special_tokens=False).ids
    assert OURS.encode(text, add_bos=False) == ids
    while ids[:1] == [2]:  # the text itself began with <bos>
        ids = ids[1:]
    assert OURS.encode(text) == [2, *ids]


@given(st.lists(TEXT | st.sampled_from(["<bos>", "<bos><bos>hi", "hi <bos>", "<|turn>user"]), max_size=5), st.booleans())
def test_a_batch_is_each_of_its_texts(texts: list[str], add_bos: bool) -> None:
    assert OURS.encode_batch(texts, add_bos) == [OURS.encode(text, add_bos) for text in texts]


@given(st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=40))
def test_decode_gives_the_text_back(text: str) -> None:
    """Byte fallback covers all of Unicode, NUL included. ▁ is how this tokenizer writes a space, so it alone comes back as one."""
    assert OURS.decode(OURS.encode(text, add_bos=False), skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["<bos>", "<bos>hi", "<bos><bos>hi", "hi"])
@pytest.mark.parametrize("post_processor", [False, True])
def test_exactly_one_bos_on_every_path(tmp_path: Path, text: str, post_processor: bool) -> None:
    folder = without_weights(tmp_path)
    if post_processor:  # the published tokenizer.json may add <bos> by itself
        library = Library.from_file(str(folder / "tokenizer.json"))
        library.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
        library.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(text)
    assert ids[0] == 2 and ids.count(2) == 1
    assert tokenizer.apply_chat_template([{"role": "user", "content": f"x{text}"}]).count(2) == 1
    no_bos = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template="{{ messages[0].content }}")
    assert no_bos == tokenizer.encode("x")


@given(st.lists(st.sampled_from(["<bos>", "hi", " ", "<", "bos>", "<|turn>user\n", "<turn|>", "é"]), max_size=6).map("".join))
def test_a_bos_inside_a_text_is_text(text: str) -> None:
    """One <bos> or none, whatever was typed; every other token is the library's, control tokens included."""
    while text.startswith("<bos>"):
        assert OURS.encode(text) == OURS.encode(text.removeprefix("<bos>"))
        text = text.removeprefix("<bos>")
    spelled = Library.from_file(str(TINY_E / "tokenizer.json"))
    spelled.encode_special_tokens = True  # the library's own way to read special tokens as text
    want: list[int] = []
    for token in LIBRARY.encode(text, add_special_tokens=False).ids:
        want += [token] if token != 2 else spelled.encode("<bos>", add_special_tokens=False).ids
    assert OURS.encode(text, add_bos=False) == want and OURS.encode(text) == [2, *want] and 2 not in want
    assert OURS.decode(want, skip_special_tokens=False) == text


def test_ids_are_those_of_transformers(heldout: list[dict[str, Any]]) -> None:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(TINY_E)
    for row in heldout[::7]:
        assert OURS.encode(row["prompt"]) == row["prompt_ids"] == oracle.encode(row["prompt"], add_special_tokens=False)
        for skip in (False, True):
            assert OURS.decode(row["output_ids"], skip) == oracle.decode(row["output_ids"], skip_special_tokens=skip)


def test_surrogates() -> None:
    assert OURS.encode("\ud83d\ude00!") == OURS.encode("\N{GRINNING FACE}!")  # a pair, read by halves
    for text in ("a\ud800b", "\ude00", "\ude00\ud83d"):
        with pytest.raises(TokenizerError, match="lone surrogate"):
            OURS.encode(text)


def test_ids_that_are_none() -> None:
    assert OURS.decode([OURS.vocab_size, 2**31]) == ""
    assert OURS.token_text(OURS.vocab_size) is None
    with pytest.raises(TokenizerError, match="0 to 4095"):
        OURS.decode([-1])
    with pytest.raises(TokenizerError, match="a text is needed"):
        OURS.encode(b"bytes")  # pyright: ignore[reportArgumentType]


def test_special_ids_are_gemma_4s() -> None:
    """Spec section 6.2."""
    want = {
        "bos": 2,
        "pad": 0,
        "tool_start": 46,
        "tool_end": 47,
        "tool_call_start": 48,
        "tool_call_end": 49,
        "tool_response_start": 50,
        "tool_response_end": 51,
        "quote": 52,
        "think": 98,
        "channel_start": 100,
        "channel_end": 101,
        "turn_start": 105,
        "turn_end": 106,
    }
    assert OURS.special_ids == want
    assert OURS.bos_token_id == 2


@pytest.mark.parametrize(
    ("eos", "want"), [([1, 106, 50], {1, 50, 106}), (7, {1, 7, 50, 106}), (None, {1, 50, 106}), ([9, 1], {1, 9, 50, 106})]
)
def test_stop_ids_are_a_union(tmp_path: Path, eos: Any, want: set[int]) -> None:
    folder = without_weights(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert Tokenizer(folder).eos_token_ids == want


def test_bytes_of_a_token() -> None:
    for text in ("é", "a b", "\0"):
        assert b"".join(OURS.token_bytes(i) for i in OURS.encode(text, add_bos=False)) == text.encode()


# ------------------------------------------------------------------------------------------------ incremental text
some_ids = st.lists(
    st.one_of(st.integers(0, 4095), st.sampled_from(BYTES), st.sampled_from([0, 1, 2, 50, 100, 106, 107, 5000])), max_size=30
)
characters = st.text(max_size=6).map(lambda s: [BYTES[b] for b in s.encode("utf-8", "ignore")])  # whole characters as byte tokens
output_ids = st.lists(st.one_of(some_ids, characters), max_size=5).map(lambda parts: list(chain(*parts)))


@given(output_ids, st.randoms(use_true_random=False), st.booleans())
def test_increments_add_up_to_decode(ids: list[int], rng: Any, skip: bool) -> None:
    detokenizer = IncrementalDetokenizer(OURS, [2], skip)
    text, at = "", 0
    while at < len(ids):
        step = rng.randint(0, 4)
        text += detokenizer.append(ids[at : at + step])
        at += step
        assert LIBRARY.decode(ids, skip_special_tokens=skip).startswith(text), "text was handed out that decode does not give"
    assert text + detokenizer.flush() == LIBRARY.decode(ids, skip_special_tokens=skip)
    assert detokenizer.flush() == ""


@given(st.text(st.characters(codec="utf-8", min_codepoint=0x80), min_size=1, max_size=3))
def test_never_half_a_character(text: str) -> None:
    ids = [BYTES[b] for b in text.encode()] + OURS.encode(" end", add_bos=False)
    detokenizer = IncrementalDetokenizer(OURS)
    parts = [detokenizer.append([i]) for i in ids]
    assert "".join(parts) + detokenizer.flush() == text + " end"
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


@pytest.mark.parametrize("text", ["é", "€", "😀"])
def test_a_character_begun_by_the_prompt_is_finished(text: str) -> None:
    ids = [BYTES[b] for b in text.encode()]
    for cut in range(1, len(ids)):
        detokenizer = IncrementalDetokenizer(OURS, [2, 1257, *ids[:cut]])
        assert detokenizer.append([*ids[cut:], 1257]) == text + OURS.decode([1257])
        broken = IncrementalDetokenizer(OURS, [2, *ids[:cut]])
        assert broken.append([1257]) + broken.flush() == OURS.decode([1257]), "the prompt's own bytes are no output"


def test_the_prompts_own_bytes_are_no_output() -> None:
    euro = [BYTES[b] for b in "€".encode()]
    finished = IncrementalDetokenizer(OURS, [2, *(BYTES[b] for b in "é".encode())])
    assert finished.append([*euro, 1257]) == "€" + OURS.decode([1257])
    broken = IncrementalDetokenizer(OURS, [2, BYTES[0xC3]])
    assert broken.append([BYTES[0xFF], BYTES[0x41], 1257]) == "\ufffd\ufffd" + OURS.decode([1257])


def test_cost_is_linear() -> None:
    """Decoding the whole text at every token would touch 400 million ids here and take minutes."""
    import time

    ids = [i for i in range(300, 4000)] * 8
    detokenizer = IncrementalDetokenizer(OURS)
    start = time.perf_counter()
    for i in ids:
        detokenizer.append([i])
    assert time.perf_counter() - start < 5.0


# ------------------------------------------------------------------------------------------------ broken folders
@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", None, "tokenizer.json: no such file"),
        ("tokenizer.json", "{broken", "tokenizer.json: not readable as a tokenizer"),
        ("tokenizer.json", "{}", "tokenizer.json: not readable as a tokenizer"),
        ("tokenizer_config.json", None, "tokenizer_config.json: no such file"),
        ("tokenizer_config.json", "{broken", "tokenizer_config.json: not readable as JSON"),
        ("tokenizer_config.json", "[]", "holds a list"),
        ("tokenizer_config.json", '{"bos_token": "<nope>"}', "no <bos>"),
        ("tokenizer_config.json", '{"chat_template": [1]}', None),
        ("generation_config.json", "\xff\xfe", "generation_config.json: not readable"),
        ("generation_config.json", '{"eos_token_id": ["x"]}', "eos_token_id is"),
    ],
)
def test_broken_files_are_one_kind_of_error(tmp_path: Path, file: str, content: str | None, says: str | None) -> None:
    folder = without_weights(tmp_path)
    path = folder / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content.encode("latin-1"))
    if says is None:  # chat_template.jinja wins, the broken one is not looked at
        Tokenizer(folder)
        (folder / "chat_template.jinja").unlink()
        says = "neither a text nor a list"
    with pytest.raises(TokenizerError, match=says):
        Tokenizer(folder)


def test_another_decoder_is_refused(tmp_path: Path) -> None:
    folder = without_weights(tmp_path)
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text())
    data["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    file.write_text(json.dumps(data))
    with pytest.raises(TokenizerError, match="decoder"):
        Tokenizer(folder)


def test_a_long_text_is_read_and_written_as_a_short_one_is(tiny_e: Path) -> None:
    """Long ones take the library's batch call, which lets other threads run."""
    tokenizer = Tokenizer(tiny_e)
    piece = "On which continent is Nepal? <|turn>user\n"
    long = tokenizer.encode(piece * 1000, add_bos=False)
    assert long == tokenizer.encode(piece, add_bos=False) * 1000
    assert tokenizer.decode(long, skip_special_tokens=False) == piece * 1000
    assert len(piece * 1000) <= len(long) * tokenizer.max_token_chars


def test_texts_that_do_not_come_again_are_not_kept(tiny_e: Path) -> None:
    """The library's cache of whole texts grew by 5 KiB for each of 10,000 requests."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("memory in use is read from glibc")
    libc.mallinfo2.restype = type("mallinfo2", (ctypes.Structure,), {"_fields_": [(f"f{i}", ctypes.c_size_t) for i in range(10)]})
    tokenizer = Tokenizer(tiny_e)

    def grown(first: int) -> int:
        before = libc.mallinfo2().f7  # uordblks
        for i in range(first, first + 2000):
            tokenizer.encode(f"request number {i} asks for something that nobody has asked for before, and will not ask again")
        return libc.mallinfo2().f7 - before

    grown(0)
    assert grown(2000) < 2**20


def test_a_text_of_nothing_but_bos_is_read_in_time_that_grows_with_it(tiny_e: Path) -> None:
    """Cutting them off one by one copied the text each time: a megabyte of them took minutes."""
    began = time.monotonic()
    assert Tokenizer(tiny_e).encode("<bos>" * 200_000 + "x") == [2, *OURS.encode("x", add_bos=False)]
    assert time.monotonic() - began < 10
