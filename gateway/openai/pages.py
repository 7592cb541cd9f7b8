"""Lists as OpenAI's APIs have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.exchange import Json
from gateway.records import Order
from springtide.errors import InvalidRequest

ORDER: Json = {"enum": ["asc", "desc"]}
"""For the API's own description."""


def limit_of(most: int) -> Json:
    """The same: of a page's entries."""
    return {"type": "integer", "minimum": 1, "maximum": most}


def page_of(data: Sequence[Json], more: bool) -> Json:
    """One page of a list."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": list(data), "first_id": first, "last_id": last, "has_more": more}


def order_of(query: Mapping[str, str]) -> Order:
    """In which a request's query wants a list. Raises InvalidRequest."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be 'asc' or 'desc', not {order[:100]!r}", param="order", code="invalid_value")
    return "asc" if order == "asc" else "desc"


def whole_number(query: Mapping[str, str], name: str, default: int, most: int) -> int:
    """The number of 1 to `most` in a request's query. Raises InvalidRequest."""
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
        raise InvalidRequest(f"{name} must be 1 to {most}, not {text[:40]!r}", param=name, code="invalid_value")
    return int(text)
