"""Calls written as JSON: `{"name": …, "arguments": {…}}`, or a list of such, read character by character."""

from __future__ import annotations

import json
from enum import Enum, auto

from gateway.output import CallArguments, Part
from gateway.tool_calls.base import Calls, whole_characters

_SPACE = " \t\r\n"
_ESCAPED = {chr(code): json.dumps(chr(code))[1:-1] for code in range(0x20)}
"""Models break lines within strings, of which JSON would have them say so."""
_ARGUMENTS = ("arguments", "parameters")


class _At(Enum):
    VALUE = auto()
    """Before the object or list."""
    ENTRY = auto()
    """In the list, before an object or the list's end."""
    KEY = auto()
    """In the object, before a key or its end."""
    IN_KEY = auto()
    COLON = auto()
    FIELD = auto()
    """Before a field's value."""
    IN_FIELD = auto()
    DONE = auto()
    FAILED = auto()


class JsonCalls:
    """The reader of one object, or of one list of them. The arguments of a call are given out as the model writes them."""

    def __init__(self, calls: Calls, known_only: bool = False) -> None:
        """`known_only`: an object is a call only where its name is one of the tools'."""
        self._calls = calls
        self._known_only = known_only
        self._at = _At.VALUE
        self._in_list = False
        self._arguments_alone = False
        self._unclaimed: list[str] = []
        self.has_calls = False
        self._parts: list[Part] = []
        self._key = ""
        self._raw: list[str] = []
        """Of the key or value that is being read."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._new_object()

    def _new_object(self) -> None:
        self._number: int | None = None
        self._arguments: list[str] = []
        """Of this call, not yet given out."""
        self._has_arguments = False
        self._streaming = False

    def begin(self, name: str) -> None:
        """Instead of an object with name and arguments, an object comes that is the arguments of a call of `name`."""
        self._arguments_alone = True
        self._claim(json.dumps(name))
        self._key, self._at = _ARGUMENTS[0], _At.FIELD

    @property
    def done(self) -> bool:
        return self._at is _At.DONE

    @property
    def failed(self) -> bool:
        """It is not what was expected, and what has not been taken in is mere text."""
        return self._at is _At.FAILED

    @property
    def unclaimed(self) -> str:
        """The text that has been taken in, where there is no call in it."""
        return "" if self.has_calls else "".join(self._unclaimed)

    def push(self, text: str) -> int:
        """How many characters of `text` it has taken in: all of them, unless it is done or has failed."""
        for index, character in enumerate(text):
            if self._at in (_At.DONE, _At.FAILED):
                return index
            if not self.has_calls:
                self._unclaimed.append(character)
            self._step(character)
        return len(text)

    def taken(self) -> list[Part]:
        """The parts that have become certain since the last time."""
        self._give_arguments()
        parts, self._parts = self._parts, []
        return parts

    def _give_arguments(self) -> None:
        if self._number is not None and self._arguments:
            self._parts.append(CallArguments(self._number, "".join(self._arguments)))
            self._arguments = []

    def _step(self, character: str) -> None:
        if self._at is _At.IN_KEY:
            if self._ends_string(character):
                self._at = _At.COLON
        elif self._at is _At.IN_FIELD:
            self._in_field(character)
        elif character in _SPACE:
            pass
        elif self._at is _At.VALUE and character == "[":
            self._in_list, self._at = True, _At.ENTRY
        elif self._at in (_At.VALUE, _At.ENTRY) and character == "{":
            self._new_object()
            self._at = _At.KEY
        elif self._at is _At.ENTRY and character == ",":
            pass
        elif self._at is _At.ENTRY and character == "]":
            self._at = _At.DONE
        elif self._at is _At.KEY and character == '"':
            self._raw, self._in_string, self._at = [character], True, _At.IN_KEY
        elif self._at is _At.KEY and character == ",":
            pass
        elif self._at is _At.KEY and character == "}":
            self._end_object()
        elif self._at is _At.COLON and character == ":":
            self._key, self._at = self._string(), _At.FIELD
        elif self._at is _At.FIELD:
            self._begin_field(character)
        else:
            self._at = _At.FAILED

    def _ends_string(self, character: str) -> bool:
        self._raw.append(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            return True
        return False

    def _string(self) -> str:
        """The text of the string that has been read."""
        try:
            value = json.loads("".join(self._raw), strict=False)
        except (ValueError, RecursionError):
            return ""
        return value if isinstance(value, str) else ""

    def _begin_field(self, character: str) -> None:
        self._at, self._raw, self._depth = _At.IN_FIELD, [], 0
        self._streaming = self._key in _ARGUMENTS and character == "{" and not self._has_arguments
        if self._streaming:
            self._has_arguments = True
        self._in_string = False
        self._in_field(character)

    def _in_field(self, character: str) -> None:
        if not self._in_string and self._depth == 0 and character in ",}]" and self._raw:
            self._at = _At.KEY
            self._end_field()
            if self._at is _At.KEY and character != ",":
                self._step(character)
            return
        if self._in_string:
            self._ends_string(character)
        else:
            self._raw.append(character)
            if character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
        if self._depth < 0:
            self._at = _At.FAILED
            return
        if self._streaming:
            self._arguments.append(_ESCAPED.get(character, character) if self._in_string else character)
            self._raw = ["."]
            if self._depth == 0:
                self._streaming = False
                self._at = _At.KEY
                if self._arguments_alone:
                    self._end_object()

    def _end_field(self) -> None:
        raw = "".join(self._raw).strip()
        if self._key == "name" and self._number is None:
            self._claim(raw)
        elif self._key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            self._arguments.append(_as_object(raw))

    def _claim(self, raw: str) -> None:
        self._raw = [raw]
        name = whole_characters(self._string())
        if not name or (self._known_only and name not in self._calls.names):
            self._at = _At.FAILED
            return
        self.has_calls = True
        call = self._calls.begun(name)
        self._number = call.number
        self._parts.append(call)
        self._unclaimed.clear()

    def _end_object(self) -> None:
        if self._number is None:
            self._at = _At.FAILED
            return
        if not self._has_arguments:
            self._arguments.append("{}")
        self._give_arguments()
        self._number = None
        self._at = _At.ENTRY if self._in_list else _At.DONE


def _as_object(raw: str) -> str:
    """Arguments that are no object as they stand: a string that is one, or nothing."""
    try:
        value = json.loads(raw, strict=False)
        inner = json.loads(value, strict=False) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return "{}"
    if not isinstance(inner, dict):
        return "{}"
    written = value if isinstance(value, str) else raw
    return written if _ESCAPED.keys().isdisjoint(written) else json.dumps(inner, ensure_ascii=False)
