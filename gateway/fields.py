"""The types of fields that request bodies of all APIs are made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, WithJsonSchema, model_validator

MAX_FIELDS = 256
"""Of an object: those that are not known are listed one by one."""


class Body(BaseModel):
    """An object in a request. A field that it does not have is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _of_few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(
                f"{next(name for name in value if name not in cls.model_fields)} and {len(value) - 1} more are too many fields"
            )
        return value


def neutral(*allowed: Any) -> Callable[[Any], Any]:
    """A check that a field has a value that asks for nothing: null, or one of `allowed`."""

    def check(value: Any) -> Any:
        if value is None or any(value == one and type(value) is type(one) for one in allowed):
            return value
        choices = " or ".join(["null", *(repr(one).lower() if isinstance(one, bool) else repr(one) for one in allowed)])
        raise ValueError(f"is not supported by this server; leave it out (or send {choices})")

    return check


def unicode_text(text: str) -> str:
    """The text itself. JSON can write half a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"is not valid Unicode at character {error.start}") from None
    return text


def default_when_null(default: Any) -> BeforeValidator:
    """Null is the same as leaving the field out."""
    return BeforeValidator(lambda value: default if value is None else value)


def json_value(value: Any) -> Any:
    """The value itself, if it can be written as JSON again: templates write it, and constraints are made of it."""
    try:
        unicode_text(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    return value


Text = Annotated[str, AfterValidator(unicode_text)]
JsonObject = Annotated[dict[str, Any], AfterValidator(json_value)]
Flag = Annotated[bool, default_when_null(False)]
Neutral = Annotated[Any, AfterValidator(neutral())]
NeutralFalse = Annotated[Any, AfterValidator(neutral(False))]
NeutralList = Annotated[Any, AfterValidator(neutral([]))]
NeutralObject = Annotated[Any, AfterValidator(neutral({}))]
NOTHING_ELSE = WithJsonSchema({"not": {}})
"""For the API's description, of what is there only to be refused by name."""
