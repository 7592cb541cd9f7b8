"""What the parsers of calls have in common."""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection
from typing import Protocol

from gateway.output import CallArguments, CallBegun, Content, Part

_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 24


class PartReader(Protocol):
    """Reads the text of one output, in whatever pieces it comes: the parts, neighbours of one kind put together, are always the same."""

    def push(self, text: str) -> list[Part]:
        """The parts, or pieces of them, that have become certain with this text."""
        ...

    def finish(self) -> list[Part]:
        """The rest, when the output has ended."""
        ...


def whole_characters(text: str) -> str:
    """The text with the halves of surrogate pairs put together where both are there, and replaced where they are not: models write them as
    escapes, and they are no Unicode by themselves."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Calls:
    """The calls of one output, numbered as they come."""

    def __init__(self, names: Collection[str], id_length: int = 0) -> None:
        """`names` of the tools there are. `id_length`: where a model's template wants ids of so many letters; 0: it does not."""
        self.names = frozenset(names)
        self.count = 0
        self._id_length = id_length

    def begun(self, name: str) -> CallBegun:
        """The next call."""
        letters = "".join(secrets.choice(_ALPHABET) for _ in range(self._id_length or _ID_LENGTH))
        call = CallBegun(self.count, letters if self._id_length else f"call_{letters}", name)
        self.count += 1
        return call

    def whole(self, name: str, arguments: str) -> list[Part]:
        """The next call, with its arguments."""
        call = self.begun(name)
        return [call, CallArguments(call.number, arguments)]


def content(text: str) -> list[Part]:
    return [Content(text)] if text else []


def beginning_at_the_end(text: str, marker: str) -> int:
    """The length of the longest end of `text` with which `marker`, that is not in it as a whole, begins."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
