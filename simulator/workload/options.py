"""What the options of all generators have in common: they are numbers, and say which are right."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from springtide.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GeneratorOptions:
    """Base of the options of one generator, every one a number with a default. Raises ConfigError for one that is out of range:
    options whose default is a whole number are whole, `*_share` ones are above 0 and below 1, and the others not below 0, or above 0
    unless named in `may_be_0`."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            wanted = _wanted(option.name, option.default, option.name in self.may_be_0())
            if not _is_right(value, wanted):
                raise ConfigError(f"{option.name} of this workload should be {wanted}, not {value!r}", param=option.name)

    @classmethod
    def may_be_0(cls) -> frozenset[str]:
        return frozenset(option.name for option in fields(cls) if option.name.endswith("_cv"))


def _wanted(name: str, default: Any, may_be_0: bool) -> str:
    if name.endswith("_share"):
        return "a number above 0 and below 1"
    return f"a {'whole ' if isinstance(default, int) else ''}number {'not below' if may_be_0 else 'above'} 0"


def _is_right(value: Any, wanted: str) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if "whole" in wanted and not isinstance(value, int):
        return False
    least_is_right = value >= 0 if "not below" in wanted else value > 0
    return least_is_right and value < (1 if "below 1" in wanted else float("inf"))
