"""From token ids to text, as they come. No torch."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What it needs of `engine.tokenizer.tokenizer.Tokenizer`."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class StreamingDetokenizer:
    """The text of one output, token by token, in constant time a token; half a character waits for its other half.

    Special tokens have no text unless `skip_special_tokens` is off. An output goes on where its prompt ended, so a leading space is kept;
    with `at_start`, as for a whole text, the one that SentencePiece puts in front is dropped.
    """

    def __init__(self, tokens: TokenBytes, *, skip_special_tokens: bool = True, at_start: bool = False, kept: Collection[int] = ()) -> None:
        """`kept` are special tokens that have a text all the same."""
        self._tokens = tokens
        self._skip_special_tokens = skip_special_tokens
        self._kept = frozenset(kept)
        self._drop_space = at_start
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token, possibly none."""
        if self._skip_special_tokens and self._tokens.is_special(token_id) and token_id not in self._kept:
            return ""
        return self._strip(self._decoder.decode(self._tokens.token_bytes(token_id)))

    def push_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.push, token_ids))

    def text_of(self, token_id: int) -> str:
        """The whole text of a token, after `finish`, a special one's too."""
        return self._tokens.token_bytes(token_id).decode("utf-8", errors="replace")

    def finish(self) -> str:
        """What is left: an incomplete character at the end becomes U+FFFD."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text
