"""The types of fields that request bodies of all APIs are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from gateway.api_request import CacheMark
from springtide.errors import InvalidRequest
from springtide.protocol.sampling import REPETITION_PENALTIES

TOOL_NAME = r"^[\w.:/-]+$"
"""Of functions that are declared."""
MAX_NAME_LENGTH = 256
"""Of these, and of other names in messages, where an API says no other."""
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


class OnlyNeutral:
    """Of a field in an annotation: its value must ask for nothing, which null does, and each of `allowed`."""

    def __init__(self, *allowed: Any) -> None:
        self._allowed = allowed

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, _: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self._allowed]}

    def _checked(self, value: Any) -> Any:
        if value is None or any(value == one and type(value) is type(one) for one in self._allowed):
            return value
        choices = " or ".join(["null", *(repr(one).lower() if isinstance(one, bool) else repr(one) for one in self._allowed)])
        raise ValueError(f"is not supported by this server; leave it out (or send {choices})")


class OrText:
    """Of a field in an annotation: it may be a text too, of which `read` makes what it otherwise is."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read = read

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._of, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(schema)]}

    def _of(self, value: Any) -> Any:
        return self._read(value) if isinstance(value, str) else value


def unicode_text(text: str) -> str:
    """The text itself. JSON can write half a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"is not valid Unicode at character {error.start}") from None
    return text


class _NullIs:
    """Of a field in an annotation: null is this value."""

    def __init__(self, default: Any) -> None:
        self._default = default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(lambda value: self._default if value is None else value, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": "null"}]}


def default_when_null(default: Any) -> _NullIs:
    """Null is the same as leaving the field out."""
    return _NullIs(default)


def json_value(value: Any) -> Any:
    """The value itself, if it can be written as JSON again: templates write it, and constraints are made of it."""
    try:
        unicode_text(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    return value


def json_object(text: str) -> dict[str, Any] | None:
    """The object of a JSON text, such as a call's arguments; None where it is none, or cannot be written again."""
    try:
        value = json_value(json.loads(text))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def check_own_names(names: Sequence[str]) -> None:
    """Raises InvalidRequest where two of the functions that are declared have the same."""
    if len(set(names)) < len(names):
        raise InvalidRequest("tools: functions must have names of their own", param="tools", code="invalid_value")


Text = Annotated[str, AfterValidator(unicode_text)]
JsonObject = Annotated[dict[str, Any], AfterValidator(json_value)]
Flag = Annotated[bool, default_when_null(False)]
Neutral = Annotated[Any, OnlyNeutral()]
NeutralFalse = Annotated[Any, OnlyNeutral(False)]
NeutralList = Annotated[Any, OnlyNeutral([])]
NeutralObject = Annotated[Any, OnlyNeutral({})]
Temperature = Annotated[float | None, Field(json_schema_extra={"minimum": 0, "maximum": 2})]
"""This and the next are described alone: `SamplingParams` checks them."""
TopP = Annotated[float | None, Field(json_schema_extra={"minimum": 0, "maximum": 1})]
MinP = Annotated[float | None, Field(json_schema_extra={"minimum": 0, "maximum": 1})]
Penalty = Annotated[float | None, Field(json_schema_extra={"minimum": -2, "maximum": 2})]
RepetitionPenalty = Annotated[float | None, Field(json_schema_extra=dict(zip(("minimum", "maximum"), REPETITION_PENALTIES, strict=True)))]
NOTHING_ELSE = WithJsonSchema({"not": {}})
"""For the API's description, of what is there only to be refused by name."""
_CACHE_TTL_S = {"5m": 300.0, "1h": 3600.0}


class CacheControl(Body):
    """Anthropic's mark on what ends a prefix that is to be kept. Clients that speak several APIs send it with OpenAI's chats as well."""

    type: Literal["ephemeral"]
    ttl: Annotated[Literal["5m", "1h"], default_when_null("5m")] = "5m"

    @property
    def mark(self) -> CacheMark:
        return CacheMark(_CACHE_TTL_S[self.ttl])
