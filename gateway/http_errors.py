"""Every error in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from springtide.errors import InvalidRequest, Overloaded, SpringtideError, Unauthenticated, Unavailable

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


REQUEST_ID_HEADER = "x-request-id"
"""Of every answer to a generation: under it, the log has what became of the request."""
_MEANT_FOR_CLIENTS = ("shutting_down", "not_ready", "deadline", "internal_error")
"""Codes of server errors whose messages say nothing of nodes and addresses."""


def message_for_client(error: SpringtideError, request_id: str = "") -> str:
    """The message for clients. Which node failed, and where it is, is for the log; they learn under which id to look there."""
    if error.http_status < 500 or error.code in _MEANT_FOR_CLIENTS:
        return error.message
    what = "the cluster cannot serve this request just now; try again later" if isinstance(error, Unavailable) else "internal error"
    return f"{what} (the server's log has more{f' under {request_id}' if request_id else ''})"


def error_body(error: SpringtideError, request_id: str = "") -> dict[str, Any]:
    message = message_for_client(error, request_id)
    return {"error": {"message": message, "type": error.openai_type, "param": error.param, "code": error.code}}


def error_response(error: SpringtideError, request_id: str = "") -> JSONResponse:
    headers = {REQUEST_ID_HEADER: request_id} if request_id else {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error, request_id), status_code=error.http_status, headers=headers)


def install(app: FastAPI) -> None:
    app.add_exception_handler(SpringtideError, _on_springtide_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)


async def _on_springtide_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, SpringtideError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    what = f"{error.detail}: {request.method} {request.url.path}"
    body = {"error": {"message": what, "type": "invalid_request_error", "param": None, "code": _HTTP_CODES.get(error.status_code)}}
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_bug(_: Request, error: Exception) -> JSONResponse:
    # Starlette raises it again afterwards, so that the server logs it with its traceback.
    return error_response(SpringtideError("internal error; the server's log has more", code="internal_error"))


def explain(problem: ErrorDetails) -> InvalidRequest:
    """The error for one of pydantic's problems, in words that name the field and the value."""
    kind, message = problem["type"], problem["msg"]
    param = _dotted(problem["loc"])
    if not param:
        # Raised by a validator of the whole body, whose words begin with the field.
        text = message.removeprefix("Value error, ")
        return InvalidRequest(text, param=text.split()[0], code="invalid_value")
    if kind == "extra_forbidden":
        return InvalidRequest(f"{param} is not a field that this server supports", param=param, code="unknown_parameter")
    if kind == "missing":
        return InvalidRequest(f"{param} is required", param=param, code="missing_required_parameter")
    if kind in ("value_error", "assertion_error"):
        return InvalidRequest(f"{param} {message.removeprefix('Value error, ')}", param=param, code="invalid_value")
    value = problem.get("input")
    shown = f", not {value!r}" if isinstance(value, (str, int, float, bool, type(None))) and len(repr(value)) < 100 else ""
    return InvalidRequest(f"{param}: {message[:1].lower()}{message[1:]}{shown}", param=param, code="invalid_value")


def _dotted(location: Sequence[str | int]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
