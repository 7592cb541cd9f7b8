"""The cost model of this machine: from the file of `springtide profile`, or measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeGuard, TypeVar

from springtide.cost import DecodeCost, PrefillCost
from springtide.errors import ConfigError
from springtide.protocol.instances import Role

CostT = TypeVar("CostT", PrefillCost, DecodeCost)


def cost_model(kind: type[CostT], phase: Role, profile: Path | None, measure: Callable[[], CostT]) -> CostT:
    """`profile`, a JSON object, has a list of three coefficients for each phase. Raises ConfigError when it does not."""
    if profile is None:
        return measure()
    try:
        document = json.loads(profile.read_text())
    except OSError as error:
        raise ConfigError(f"profile: cannot read {profile}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"profile: {profile} is not JSON: {error}") from None
    coefficients = document.get(phase) if isinstance(document, dict) else None
    if not _are_coefficients(coefficients):
        raise ConfigError(f"profile: {phase.value!r} in {profile} must be a list of 3 numbers >= 0, not {coefficients!r}")
    return kind(*map(float, coefficients))


def _are_coefficients(value: object) -> TypeGuard[list[float]]:
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(
            isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number) and number >= 0 for number in value
        )
    )
