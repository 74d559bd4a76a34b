"""Tokens of a text from the tokens of its parts, exactly: a prompt's state is tokenized once, however many questions follow it.

BPE merges greedily by rank, so a sequence of tokens, each of them and each neighbouring pair of them being what its own text encodes to,
is what the whole text encodes to: the first merge across a boundary would also happen in that pair alone. Two encodings can therefore
be put behind one another when the two tokens that meet encode to themselves; where they do not, the whole text is encoded."""

from __future__ import annotations

from collections.abc import Sequence

from lastrow.tokenizer import Tokenizer

MOST_PAIRS = 1 << 18  # that are remembered


class Splicer:
    """Remembers which tokens may meet; one per tokenizer. Tokens that no text has (bytes of a character) go the slow way.

    num_joined, num_encoded: calls of `join` that put tokens together, and that encoded the whole text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_joined = self.num_encoded = 0
        self._meet: dict[tuple[int, int], bool] = {}
        # An added token is found in the text before any merge; one that spans the seam has both characters around it.
        self._pairs = {token[i : i + 2] for token in tokenizer.added_tokens for i in range(len(token) - 1)}

    def encode(self, text: str) -> list[int]:
        """Tokens of a part of a prompt; the <bos> in front of the whole is not among them."""
        return self.tokenizer.encode(text, add_bos=False)

    def join(self, left_text: str, left: Sequence[int], right_text: str, right: Sequence[int]) -> list[int]:
        """Tokens of left_text + right_text; left and right are the tokens of the two alone."""
        if not left or not right or (left_text[-1:] + right_text[:1] not in self._pairs and self._may_meet(left[-1], right[0])):
            self.num_joined += 1
            return [*left, *right]
        self.num_encoded += 1
        return self.encode(left_text + right_text)

    def _may_meet(self, a: int, b: int) -> bool:
        """Whether the texts of two tokens, one behind the other, encode to these two."""
        pair = a, b
        if pair not in self._meet:
            if len(self._meet) >= MOST_PAIRS:
                self._meet.clear()
            texts = self.tokenizer.token_text(a), self.tokenizer.token_text(b)
            whole = "".join(text or "" for text in texts)
            self._meet[pair] = None not in texts and self.encode(whole) == [a, b]
        return self._meet[pair]


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
