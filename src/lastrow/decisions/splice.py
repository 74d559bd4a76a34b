"""Tokens of a text from the tokens of its parts, exactly: a prompt's state is tokenized once, however many questions follow it.

BPE merges greedily by rank, so a sequence of tokens, each of them and each neighbouring pair of them being what its own text encodes to,
is what the whole text encodes to: the first merge across a boundary would also happen in that pair alone. Two encodings can therefore
be put behind one another when the two tokens that meet encode to themselves; where they do not, the whole text is encoded."""

from __future__ import annotations

from collections.abc import Sequence

from lastrow.tokenizer import Tokenizer


class Splicer:
    """Remembers which tokens may meet; one per tokenizer. Not for tokens that no text has (byte tokens of a character's parts): those
    go the slow way."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._meet: dict[tuple[int, int], bool] = {}
        self._starts: dict[str, tuple[str, ...]] = {}
        self.num_joined = self.num_encoded = 0

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_bos=False)

    def join(self, left_text: str, left: Sequence[int], right_text: str, right: Sequence[int]) -> list[int]:
        """Tokens of left_text + right_text; left and right are the tokens of the two alone."""
        if not left or not right or (self.may_meet(left[-1], right[0]) and not left_text.endswith(self._open_ends(right_text))):
            self.num_joined += 1
            return [*left, *right]
        self.num_encoded += 1
        return self.encode(left_text + right_text)

    def may_meet(self, a: int, b: int) -> bool:
        """Whether the texts of two tokens, one behind the other, encode to these two."""
        pair = a, b
        if pair not in self._meet:
            texts = self.tokenizer.token_text(a), self.tokenizer.token_text(b)
            whole = "".join(text or "" for text in texts)
            self._meet[pair] = None not in texts and self.encode(whole) == [a, b]
        return self._meet[pair]

    def _open_ends(self, right_text: str) -> tuple[str, ...]:
        """Beginnings of added tokens that `right_text` would complete: an added token is found in the text before any merge."""
        if right_text not in self._starts:
            added = self.tokenizer.added_tokens
            self._starts[right_text] = tuple(
                token[:i] for token in added for i in range(1, len(token)) if right_text.startswith(token[i : i + len(right_text)])
            )
        return self._starts[right_text]


def common_prefix(a: Sequence[int], b: Sequence[int], known: int = 0) -> int:
    """How many first tokens two lists share. known: a guess at or under it; a good one saves the search."""
    length = min(len(a), len(b))
    at = known if known <= length and a[:known] == b[:known] else 0
    while at < length and a[at] == b[at]:
        step = 1
        while at + step <= length and a[at : at + step] == b[at : at + step]:
            at += step
            step *= 2
    return at
