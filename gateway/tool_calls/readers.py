"""The parsers of calls, one for each way in which families of models write them."""

from __future__ import annotations

import re
from collections.abc import Callable

from gateway.output import Part
from gateway.tool_calls.base import Calls, beginning_at_the_end, content
from gateway.tool_calls.json_calls import JsonCalls
from gateway.tool_calls.pythonic import CallEnd, begun_call, python_call

_SPACE = " \t\r\n"
_NAMED = re.compile(r"([\w.:/-]{1,128})\s{0,8}(?:\[CALL_ID\]\w{1,64}\s{0,8})?(?:\[ARGS\]\s{0,8})?\{")
_NAMING, _MOST_NAMING = re.compile(r"[\w.:/\-\s\[\]]*"), 256
"""What may still become that."""
_LIST = re.compile(r"\[\s*([\w.:/-]*)\s*(\(?)")


class _Reader:
    """Text in the making. `_read` takes from the front of `_text` what it can make something of, and returns None when it needs more."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._text = ""
        self._state: Callable[[], list[Part] | None]

    def push(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        while (more := self._state()) is not None:
            parts += more
        return parts

    def _take(self, length: int) -> str:
        text, self._text = self._text[:length], self._text[length:]
        return text


class _JsonReader(_Reader):
    """A block of JSON, which has begun after `_lead`."""

    def __init__(self, calls: Calls, block: JsonCalls) -> None:
        super().__init__(calls)
        self._block = block
        self._lead = ""
        """Text before the block that belongs to it."""

    def _rest_of_block(self) -> list[Part]:
        """Of one that has ended before its time, or is no call."""
        parts, lead, self._lead = self._block.taken(), self._lead, ""
        return parts if self._block.has_calls else [*parts, *content(lead + self._block.unclaimed)]

    def _in_block(self, in_text: Callable[[], list[Part] | None], after: Callable[[], list[Part] | None]) -> list[Part] | None:
        if not self._text and not self._block.done and not self._block.failed:
            return None
        self._take(self._block.push(self._text))
        if self._block.failed or (self._block.done and not self._block.has_calls):
            self._state = in_text
            return self._rest_of_block()
        if self._block.done:
            self._state = after
        return self._block.taken()


class MarkedReader(_JsonReader):
    """Calls between a marker and, where there is one, its counterpart, anywhere in a text: Hermes', Qwen's and Mistral's."""

    def __init__(self, calls: Calls, begin: str, end: str = "") -> None:
        super().__init__(calls, JsonCalls(calls))
        self._begin, self._end = begin, end
        self._state = self._in_text

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._state == self._in_call:
            parts = self._rest_of_block()
        elif self._state == self._at_name:
            parts = content(self._lead)
        rest = self._take(len(self._text))
        # What is after a call is nobody's, or the beginning of a marker.
        return parts if self._state in (self._after_call, self._after_block) else [*parts, *content(rest)]

    def _in_text(self) -> list[Part] | None:
        at = self._text.find(self._begin)
        if at >= 0:
            before = self._take(len(self._text[:at].rstrip(_SPACE)))
            # Space before the marker is nobody's where a call follows, and text as the marker is where none does.
            self._lead = self._take(at - len(before) + len(self._begin))
            self._block = JsonCalls(self._calls)
            self._state = self._at_name if not self._end else self._in_call
            return content(before)
        return self._released(len(self._text) - beginning_at_the_end(self._text, self._begin))

    def _released(self, length: int) -> list[Part] | None:
        """Text up to there, without the space at its end, which is left out where a call follows."""
        text = self._take(len(self._text[:length].rstrip(_SPACE)))
        return content(text) or None

    def _at_name(self) -> list[Part] | None:
        """After a marker without counterpart: JSON, or as Mistral's later models write, `[TOOL_CALLS]name[CALL_ID]id[ARGS]{…}`."""
        self._lead += self._take(len(self._text) - len(self._text.lstrip(_SPACE)))
        if not self._text:
            return None
        if self._text[0] in "[{":
            self._state = self._in_call
            return []
        if (match := _NAMED.match(self._text)) is not None:
            self._take(match.end() - 1)
            self._block.begin(match[1])
            self._state = self._in_call
            return []
        if len(self._text) < _MOST_NAMING and _NAMING.fullmatch(self._text):
            return None
        self._state = self._in_text
        return content(self._lead)

    def _in_call(self) -> list[Part] | None:
        return self._in_block(self._in_text, self._after_call if self._end else self._after_block)

    def _after_call(self) -> list[Part] | None:
        """Before the block's end: a further call may come, or, where a model leaves the end out, another block or text."""
        self._text = self._text.lstrip(_SPACE)
        if self._text.startswith(self._end):
            self._take(len(self._end))
            self._state = self._after_block
            return []
        if self._end.startswith(self._text) or not (further := self._text.lstrip(_SPACE + ",;")):
            return None
        self._state = self._in_text
        if further[0] in "{[":
            self._lead = self._take(len(self._text) - len(further))
            self._block, self._state = JsonCalls(self._calls), self._in_call
        return []

    def _after_block(self) -> list[Part] | None:
        """Between a block and what follows: another one, or text. The space between is nobody's."""
        self._text = self._text.lstrip(_SPACE)
        if not self._text:
            return None
        self._state = self._in_text
        return []


class BareReader(_JsonReader):
    """Calls that are the whole output: Llama 3's JSON objects, with semicolons between them."""

    def __init__(self, calls: Calls, markers: tuple[str, ...]) -> None:
        """`markers` may stand before the first call."""
        super().__init__(calls, JsonCalls(calls, known_only=True))
        self._markers = markers
        self._state = self._at_beginning

    def finish(self) -> list[Part]:
        if self._state == self._in_call:
            return self._rest_of_block()
        rest = self._lead + self._take(len(self._text))
        return [] if self._state == self._after_call else content(rest)

    def _at_beginning(self) -> list[Part] | None:
        self._lead += self._take(len(self._text) - len(self._text.lstrip(_SPACE)))
        if not self._text:
            return None
        for marker in self._markers:
            if self._text.startswith(marker):
                self._lead += self._take(len(marker))
                return []
            if marker.startswith(self._text):
                return None
        if self._text[0] in "{[":
            self._state = self._in_call
            return []
        lead, self._lead = self._lead, ""
        self._state = self._in_text
        return content(lead)

    def _in_text(self) -> list[Part] | None:
        return content(self._take(len(self._text))) or None

    def _in_call(self) -> list[Part] | None:
        return self._in_block(self._in_text, self._after_call)

    def _after_call(self) -> list[Part] | None:
        self._text = self._text.lstrip(_SPACE + ";")
        if not self._text:
            return None
        self._block, self._lead = JsonCalls(self._calls, known_only=True), ""
        self._state = self._at_beginning
        return []


class PythonicReader(_Reader):
    """Calls that are the whole output, a list of Python calls: `[weather(city="Rome"), time()]`. Each comes when it is complete; of one
    that is cut off, the arguments that are."""

    def __init__(self, calls: Calls, begin: str = "", end: str = "") -> None:
        """`begin` and `end` may stand around the list."""
        super().__init__(calls)
        self._begin, self._end = begin, end
        self._lead = ""
        """Text before the next call, which is nobody's unless it turns out to be none."""
        self._call_end: CallEnd | None = None
        self._state = self._at_beginning

    def finish(self) -> list[Part]:
        rest = self._take(len(self._text))
        if self._state == self._after_list:
            return []
        if self._state != self._in_list:
            return content(rest)
        if self._calls.count and "(" not in rest:
            # Of a further call not even the name is there.
            return []
        begun = begun_call(rest, self._call_end.last_comma if self._call_end else 0)
        return self._called(begun) or content(self._lead + rest)

    def _called(self, call: tuple[str, str] | None) -> list[Part]:
        """Nothing where it is no call of a tool."""
        return [] if call is None or call[0] not in self._calls.names else self._calls.whole(*call)

    def _at_beginning(self) -> list[Part] | None:
        text = self._text.lstrip(_SPACE)
        if self._begin:
            if self._begin.startswith(text) and len(text) < len(self._begin):
                return None
            text = text.removeprefix(self._begin).lstrip(_SPACE)
        if not text:
            return None
        name = _LIST.match(text)
        if name is not None and not name[2] and name.end() == len(text):
            return None
        self._state = self._in_text
        if name is not None and name[2] and name[1] in self._calls.names:
            self._lead = self._take(len(self._text) - len(text) + 1)
            self._state = self._in_list
        return []

    def _in_text(self) -> list[Part] | None:
        return content(self._take(len(self._text))) or None

    def _in_list(self) -> list[Part] | None:
        if self._call_end is None:
            self._lead += self._take(len(self._text) - len(self._text.lstrip(_SPACE + ",")))
            if not self._text:
                return None
            if self._text[0] == "]":
                self._take(1)
                self._state = self._after_list
                return []
            self._call_end = CallEnd()
        length = self._call_end.find(self._text)
        if length is None:
            return None
        self._call_end = None
        if parts := self._called(python_call(self._text[:length])):
            self._take(length)
            self._lead = ""
            return parts
        self._state = self._in_text
        return content(self._lead)

    def _after_list(self) -> list[Part] | None:
        """The space between the list and text is nobody's."""
        text = self._text.lstrip(_SPACE)
        if self._end.startswith(text):
            return None
        text = text.removeprefix(self._end).lstrip(_SPACE)
        if not text:
            return None
        self._text, self._state = text, self._in_text
        return []
