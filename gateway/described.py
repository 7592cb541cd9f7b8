"""What the API's own description (`/openapi.json`) says of operations: what they are sent, what they answer, and how they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

Json = dict[str, Any]

SCHEMAS = "#/components/schemas/{model}"
"""Where the description has a body's schema."""
NOTHING: Mapping[str, Json] = MappingProxyType({})
TEXT: Json = {"type": "string"}
TIME: Json = {"type": "string", "format": "date-time"}
NUMBER: Json = {"type": "number"}
WHOLE: Json = {"type": "integer", "minimum": 0}
FLAG: Json = {"type": "boolean"}
ANY_OBJECT: Json = {"type": "object"}
REFUSALS = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
"""With which any operation may be refused."""
ALSO: Mapping[str, int] = MappingProxyType({"/v1/batches/{batch_id}/cancel": 409})
"""One operation's own, beside these."""
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def in_plain_words(schema: Any) -> Any:
    """A schema of pydantic's, which of a number that is read before it is checked writes the bounds in words of its own."""
    if isinstance(schema, list):
        return [in_plain_words(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    number = schema.get("type") in ("integer", "number")
    return {_BOUNDS.get(name, name) if number else name: in_plain_words(value) for name, value in schema.items()}


def nullable(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*values: Any) -> Json:
    return {"enum": list(values)}


def array(items: Json) -> Json:
    return {"type": "array", "items": items}


def record(fields: Mapping[str, Json], sometimes: Mapping[str, Json] = NOTHING, more: Json | bool = False) -> Json:
    """An object that has these fields, those of `sometimes` at times, and no others but what is `more`."""
    return {"type": "object", "properties": {**fields, **sometimes}, "required": list(fields), "additionalProperties": more}


def operation(
    answer: Json,
    body: type[BaseModel] | None = None,
    query: Mapping[str, Json] = NOTHING,
    *,
    events: bool = False,
    form: Json | None = None,
) -> Json:
    """A route's `openapi_extra`: bodies and queries are read by us, and answers written. `events`: the answer may be a stream of events."""
    said: Json = {"responses": {"200": {"content": {"application/json": {"schema": answer}}}}}
    if events:
        said["responses"]["200"]["content"]["text/event-stream"] = {}
    if body is not None:
        content: Json = {"application/json": {"schema": {"$ref": SCHEMAS.format(model=body.__name__)}}}
        said["requestBody"] = {"required": True, "content": content}
    if form is not None:
        said["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    if query:
        said["parameters"] = [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in query.items()]
    return said


def refusals(path: str, error: Json) -> Json:
    """The answers of an operation that is refused, by status."""
    content = {"application/json": {"schema": error}}
    statuses = (*REFUSALS, ALSO[path]) if path in ALSO else REFUSALS
    return {str(status): {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}
