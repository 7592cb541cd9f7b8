"""A record of all that a ConductorCore was told, from which a fresh one comes to the same decisions.

JSON lines: the settings first, then `{"now": seconds, "event": name, ...fields}`. Block keys are hexadecimal, sets are sorted lists, enums
go by name. Floats survive exactly, so replayed decisions are the recorded ones to the digit.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

from conductor.core.conductor import ConductorCore
from conductor.core.settings import ConductorSettings
from conductor.core.types.events import Action, Event

_EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Event)}


class Recorder:
    """Writes what it is told by `write`, one line (with its line break) a call."""

    def __init__(self, settings: ConductorSettings, write: Callable[[str], object]) -> None:
        self._write = write
        write(_line({"settings": _plain(settings)}))

    def event(self, event: Event, now: float) -> None:
        """Records an event. To be called in the order of `ConductorCore.handle`, with the same arguments."""
        self._write(_line({"now": now, "event": type(event).__name__, **_plain(event)}))


def read(lines: Iterable[str]) -> tuple[ConductorSettings, Iterator[tuple[Event, float]]]:
    """The settings, and each event with its time. Raises ValueError, with the line's number, where a line is none of a record."""
    numbered = enumerate(lines, 1)
    first = next(numbered, (1, ""))
    head = _parse(*first)
    if "settings" not in head:
        raise ValueError("line 1 of a record holds the settings; this one does not")
    return _made(ConductorSettings, head["settings"]), (_event(number, line) for number, line in numbered)


def replay(lines: Iterable[str]) -> Iterator[tuple[Event, float, list[Action]]]:
    """Every event of the record, and what a fresh core does upon it. Raises ValueError as `read` does."""
    settings, events = read(lines)
    core = ConductorCore(settings)
    for event, now in events:
        yield event, now, core.handle(event, now)


def _event(number: int, line: str) -> tuple[Event, float]:
    values = _parse(number, line)
    try:
        kind = _EVENTS[values.pop("event")]
        now = float(values.pop("now"))
        return _made(kind, values), now
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"line {number} of the record is no event: {error!r}") from None


def _parse(number: int, line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} of the record is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"line {number} of the record is not a JSON object")
    return values


def _line(values: dict[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":")) + "\n"


# ---- values ----


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value))
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    return value


def _made(kind: Any, value: Any) -> Any:
    """The value of that type whose `_plain` is this."""
    if isinstance(kind, NewType):
        return _made(kind.__supertype__, value)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _made(_one_of(arguments, value), value)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _made(hints[name], entry) for name, entry in value.items()})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[value]
    if kind is bytes:
        return bytes.fromhex(value)
    if origin in (frozenset, tuple, Sequence):
        made = [_made(arguments[0], entry) for entry in value]
        return made if origin is Sequence else origin(made)
    return value


def _one_of(kinds: Sequence[Any], value: Any) -> Any:
    """Of a union: what is not None, where there is one such type; else what `value` is already."""
    others = [kind for kind in kinds if kind is not types.NoneType]
    return others[0] if len(others) == 1 else type(value)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)
