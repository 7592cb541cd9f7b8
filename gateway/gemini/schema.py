"""Gemini's schemas, which are OpenAPI's with words of their own, as JSON schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAX_DEPTH = 64
_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
_NUMBERS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")
"""Which the JSON of protocol buffers writes as texts."""
_AS_THEY_ARE = ("title", "description", "default", "enum", "minimum", "maximum", "pattern", "required", "format")
_SNAKE = {
    "any_of": "anyOf",
    "min_items": "minItems",
    "max_items": "maxItems",
    "min_properties": "minProperties",
    "max_properties": "maxProperties",
    "min_length": "minLength",
    "max_length": "maxLength",
    "property_ordering": "propertyOrdering",
    "additional_properties": "additionalProperties",
    "$defs": "defs",
    "$ref": "ref",
}
_FORMATS = ("date-time", "date", "time", "duration", "email", "uuid", "uri", "hostname", "ipv4", "ipv6")
"""Of texts, that mean the same in JSON schemas; `int32`, `enum` and so on say nothing beyond the type."""
_TOLD = ("example", "nullable", "propertyOrdering", "items", "properties", "anyOf", "additionalProperties", "defs", "ref", "type")


def json_schema(schema: dict[str, Any], closed: bool = False) -> dict[str, Any]:
    """The same as JSON schema. With `closed`, objects that name their properties have no others. Raises ValueError, whose words begin with
    what is wrong."""
    return _converted(schema, closed, MAX_DEPTH)


def _converted(schema: Any, closed: bool, depth: int) -> dict[str, Any]:
    if not isinstance(schema, dict):
        raise ValueError(f"must be a schema, an object, everywhere, not {str(schema)[:100]!r}")
    if depth == 0:
        raise ValueError(f"may be nested at most {MAX_DEPTH} deep")
    words: dict[str, Any] = {str(_SNAKE.get(name, name)): value for name, value in schema.items() if value is not None}
    if unknown := [name for name in words if name not in _AS_THEY_ARE + _NUMBERS + _TOLD]:
        raise ValueError(f"has {unknown[0][:100]!r}, which is no word of Gemini's schemas; JSON schemas go into the field for them")

    def inner(value: Any) -> dict[str, Any]:
        return _converted(value, closed, depth - 1)

    converted = {name: words[name] for name in _AS_THEY_ARE if name in words}
    if converted.get("format") not in (None, *_FORMATS):
        del converted["format"]
    converted |= {name: _number(name, words[name]) for name in _NUMBERS if name in words}
    if "type" in words and (kind := str(words["type"]).lower()) != "type_unspecified":
        if kind not in _TYPES:
            raise ValueError(f"has a type {str(words['type'])[:100]!r}; it must be one of {', '.join(_TYPES).upper()}")
        converted["type"] = kind
    if "items" in words:
        converted["items"] = inner(words["items"])
    if "anyOf" in words:
        converted["anyOf"] = [inner(one) for one in _list(words, "anyOf")]
    if "ref" in words:
        converted["$ref"] = str(words["ref"]).replace("#/defs/", "#/$defs/")
    if "defs" in words:
        converted["$defs"] = {name: inner(one) for name, one in _object(words, "defs").items()}
    if "properties" in words:
        converted["properties"] = _properties(words, inner)
        if closed:
            converted["additionalProperties"] = False
    if "additionalProperties" in words:
        further = words["additionalProperties"]
        converted["additionalProperties"] = further if isinstance(further, bool) else inner(further)
    return _nullable(converted) if words.get("nullable") is True else converted


def _properties(words: dict[str, Any], inner: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """In the order in which they are to be written."""
    properties = _object(words, "properties")
    first = [name for name in _list(words, "propertyOrdering") if isinstance(name, str) and name in properties]
    return {name: inner(properties[name]) for name in dict.fromkeys([*first, *properties])}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    told: dict[str, Any] = {name: schema.pop(name) for name in ("title", "description", "default") if name in schema}
    return {**told, "anyOf": [schema, {"type": "null"}]}


def _number(name: str, value: Any) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        return int(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and value % 1 == 0:
        return int(value)
    raise ValueError(f"has {name} {str(value)[:100]!r}, which must be a number, not negative and whole")


def _list(words: dict[str, Any], name: str) -> list[Any]:
    value = words.get(name, [])
    if not isinstance(value, list):
        raise ValueError(f"has {name} {str(value)[:100]!r}, which must be a list")
    return value


def _object(words: dict[str, Any], name: str) -> dict[str, Any]:
    value = words[name]
    if not isinstance(value, dict):
        raise ValueError(f"has {name} {str(value)[:100]!r}, which must be an object")
    return value
