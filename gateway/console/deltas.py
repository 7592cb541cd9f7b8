"""Tables of rows by their keys, and what of them has changed: in the form in which the page and `springtide top` get it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Row = Any
"""What JSON has: a list or an object."""
Table = dict[str, Row]
Tables = dict[str, Table]
_ROWS_AT_ONCE = 100


def changed(before: Table, after: Table) -> tuple[Table, list[str]]:
    """The rows of `after` that are new or others than before, and the keys of those that are gone."""
    return {key: row for key, row in after.items() if before.get(key) != row}, [key for key in before if key not in after]


def apply(tables: Tables, delta: Mapping[str, Any]) -> None:
    """Brings the tables of a `state` up to date with the `tables` of a `delta`."""
    for name, change in delta.items():
        table = tables.setdefault(name, {})
        for key in change["gone"]:
            table.pop(key, None)
        table.update(change["set"])


def written_state(head: Mapping[str, Any], tables: Tables) -> Iterator[str]:
    """The JSON of a `state`, in pieces each of which takes well below a millisecond to write."""
    yield f'{_dump(head)[:-1]},"tables":{{'
    for number, (name, table) in enumerate(tables.items()):
        yield f"{',' if number else ''}{_dump(name)}:"
        yield from _written_table(table)
    yield "}}"


def written_delta(head: Mapping[str, Any], changes: Mapping[str, tuple[Table, list[str]]]) -> Iterator[str]:
    """The JSON of a `delta`, likewise; tables that are as they were are left out."""
    yield f'{_dump(head)[:-1]},"tables":{{'
    for number, (name, (rows, gone)) in enumerate((name, change) for name, change in changes.items() if any(change)):
        yield f'{"," if number else ""}{_dump(name)}:{{"gone":{_dump(gone)},"set":'
        yield from _written_table(rows)
        yield "}"
    yield "}}"


def _written_table(table: Table) -> Iterator[str]:
    keys = list(table)
    if not keys:
        yield "{}"
    for first in range(0, len(keys), _ROWS_AT_ONCE):
        some = {key: table[key] for key in keys[first : first + _ROWS_AT_ONCE]}
        text = _dump(some)[1:-1]
        yield ("{" if first == 0 else ",") + text + ("}" if first + _ROWS_AT_ONCE >= len(keys) else "")


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
