"""Calls written as Python: `weather(city="Rome", days=3)`."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from gateway.tool_calls.base import whole_characters

_CALL = re.compile(r"\s*([\w.:/-]+)\s*(\(.*)", re.DOTALL)
_JSON_NAMES = {"true": True, "false": False, "null": None}
_MOST_DEPTH = 64


class CallEnd:
    """Finds where a call ends, in a text that grows. Takes time in proportion to what has come new."""

    def __init__(self) -> None:
        self._looked_at = 0
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self.last_comma = 0
        """Where the last argument began that has not ended yet, the first one's place being 0."""

    def find(self, text: str) -> int | None:
        """The length of the call with which `text` begins; None: it has not ended yet."""
        for index in range(self._looked_at, len(text)):
            self._looked_at = index + 1
            character = text[index]
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "'\"":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif character in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
            elif character == "," and self._depth == 1:
                self.last_comma = index
        return None


def python_call(text: str) -> tuple[str, str] | None:
    """The function and the arguments, as JSON, of a call by keywords with values that are literals. None: it is no such call."""
    match = _CALL.fullmatch(text)
    if match is None:
        return None
    try:
        # A tool's name need not be one of Python's.
        call = ast.parse("f" + match[2].rstrip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            return None
        arguments = {keyword.arg: _value(keyword.value) for keyword in call.keywords}
        if None in arguments:
            return None
        return match[1], whole_characters(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def begun_call(text: str, last_comma: int) -> tuple[str, str] | None:
    """The same of a call that was cut off: its arguments are the beginning of some, as far as they are complete. `last_comma` is a
    CallEnd's. None: it is no such call."""
    call = python_call(f"{text[:last_comma]})") if last_comma else python_call(f"{text.partition('(')[0]}()")
    return None if call is None else (call[0], call[1].removesuffix("}") if last_comma else "")


def _value(node: ast.expr, depth: int = 0) -> Any:
    """Raises ValueError for what JSON does not have."""
    if depth > _MOST_DEPTH:
        raise ValueError("nested too deeply")
    match node:
        case ast.Constant(value) if value is None or isinstance(value, (str, bool, int, float)):
            return value
        case ast.Name(name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if isinstance(value, (int, float)) and not isinstance(value, bool):
            return -value
        case ast.List(elements) | ast.Tuple(elements):
            return [_value(element, depth + 1) for element in elements]
        case ast.Dict(keys, values):
            return {_key(key): _value(value, depth + 1) for key, value in zip(keys, values, strict=True)}
    raise ValueError(f"{ast.unparse(node)} is no literal")


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(str(text)):
            return text
    raise ValueError("an object's keys are texts")
