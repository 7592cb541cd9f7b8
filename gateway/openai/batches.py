"""The routes of OpenAI's batches, and what their lines are."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from gateway.accounts.allowance import Allowance, Caller
from gateway.answer import ApiBackend, Traced, internal_error
from gateway.api_request import ApiRequest
from gateway.batches.batch import Batch, InputError
from gateway.batches.results import LineResult
from gateway.bodies import has_more_values, parse_body
from gateway.described import TEXT, operation
from gateway.exchange import Call, Endpoint, Json, Order, Pending, dump, read, written
from gateway.fields import json_value
from gateway.openai import responses
from gateway.openai.described import BATCH, listed
from gateway.openai.pages import limit_of, page_of, whole_number
from gateway.openai.routes import CHAT, COMPLETION
from gateway.prepare import in_the_clients_words
from springtide.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, SpringtideError
from springtide.ids import new_id

logger = logging.getLogger(__name__)

PATH = "/v1/batches"
LONGEST_WINDOW_S = 7 * 24 * 3600
_WINDOW = re.compile(r"(\d{1,4})([mhd])")
_UNITS_S = {"m": 60, "h": 3600, "d": 24 * 3600}
_PAGE, _MOST_BATCHES = 20, 100
_LINE_FIELDS = {"custom_id", "method", "url", "body"}
_LINE_OVERHEAD_BYTES = 4096
"""Of a line, beside the body in it."""
_NOBODYS_FAULT = (408, 429)
"""Like what is above 500."""
_MOST_TRIES = 5
"""Of a line that fails with 500: that may be its own doing, and its batch is not to wait for it to the end."""

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class BatchRequest(BaseModel):
    """The body that makes a batch."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input_file_id: str
    endpoint: Annotated[str, Field(json_schema_extra={"enum": [CHAT.path, COMPLETION.path, responses.PATH]})]
    completion_window: Annotated[str, Field(json_schema_extra={"pattern": f"^{_WINDOW.pattern}$"})]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None


BODIES = (BatchRequest,)
"""For the API's own description."""


def routes(backend: ApiBackend) -> APIRouter:
    router = APIRouter()
    desk, endpoints = backend.batches, endpoints_of(backend)

    @router.post(PATH, openapi_extra=operation(BATCH, BatchRequest))
    async def create(request: Request) -> Json:
        body = await read(backend, request, lambda raw: parse_body(raw, BatchRequest, backend.preparer.bounds.max_values))
        if body.endpoint not in endpoints:
            message = f"endpoint must be one of {', '.join(endpoints)}, not {body.endpoint!r}"
            raise InvalidRequest(message, param="endpoint", code="invalid_value")
        window_s = _window_s(body.completion_window)
        caller: Caller = request.state.caller
        if not caller.may_use(name := backend.preparer.model_name):
            message = f"model {name!r}, which is the one that is served, is not among those that this API key may use"
            raise ModelNotFound(message, code="model_not_found")
        try:
            batch = await desk.create(
                caller,
                body.endpoint,
                body.input_file_id,
                body.completion_window,
                window_s,
                body.metadata,
                time.time(),
            )
        except InvalidRequest as error:
            raise in_the_clients_words(error, {"file_id": "input_file_id"}) from None
        return batch_json(batch)

    page = {"limit": limit_of(_MOST_BATCHES), "after": TEXT}

    @router.get(PATH, openapi_extra=operation(listed(BATCH), query=page))
    async def list_batches(request: Request) -> Json:
        query = request.query_params
        limit = whole_number(query, "limit", _PAGE, _MOST_BATCHES)
        found, more = await desk.page(request.state.tenant, after=query.get("after", ""), limit=limit)
        return page_of([batch_json(batch) for batch in found], more)

    @router.get(f"{PATH}/{{batch_id}}", openapi_extra=operation(BATCH))
    async def retrieve(request: Request, batch_id: str) -> Json:
        return batch_json(await desk.get(request.state.tenant, batch_id))

    @router.post(f"{PATH}/{{batch_id}}/cancel", openapi_extra=operation(BATCH))
    async def cancel(request: Request, batch_id: str) -> Json:
        return batch_json(await desk.cancel(request.state.tenant, batch_id, int(time.time())))

    return router


def endpoints_of(backend: ApiBackend) -> Mapping[str, Endpoint]:
    """Those that batches are served for, by their paths."""
    return {endpoint.path: endpoint for endpoint in (CHAT, COMPLETION, responses.endpoint(backend))}


def _window_s(text: str) -> int:
    found = _WINDOW.fullmatch(text)
    seconds = int(found.group(1)) * _UNITS_S[found.group(2)] if found else 0
    if not 0 < seconds <= LONGEST_WINDOW_S:
        message = f"completion_window must be minutes, hours or days, such as 24h, up to 7d, not {text[:40]!r}"
        raise InvalidRequest(message, param="completion_window", code="invalid_value")
    return seconds


def batch_json(batch: Batch) -> Json:
    times = (
        "in_progress_at",
        "finalizing_at",
        "completed_at",
        "failed_at",
        "expired_at",
        "cancelling_at",
        "cancelled_at",
    )
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": [_error_json(error) for error in batch.errors]} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id or None,
        "error_file_id": batch.error_file_id or None,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{name: getattr(batch, name) or None for name in times},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
    }


def _error_json(error: InputError) -> Json:
    return {"code": error.code, "message": error.message, "line": error.line, "param": error.param}


class OpenAIBatches:
    """OpenAI's lines of batches: `BatchApi` for whoever looks after these."""

    def __init__(self, backend: ApiBackend) -> None:
        self._backend = backend
        self._endpoints = endpoints_of(backend)
        self.max_line_bytes = backend.preparer.bounds.max_body_bytes + _LINE_OVERHEAD_BYTES

    def check(self, endpoint: str, raw: bytes) -> str:
        """The line's id. What is wrong with its body is told in its place."""
        line = self._read(raw)
        for name in sorted(_LINE_FIELDS - line.keys()):
            raise InvalidRequest(f"{name} is required", param=name, code="missing_required_parameter")
        for name in line.keys() - _LINE_FIELDS:
            raise InvalidRequest(f"{name} is no field of a line", param=name, code="unknown_parameter")
        custom_id = line["custom_id"]
        if not isinstance(custom_id, str):
            raise InvalidRequest("custom_id must be a text", param="custom_id", code="invalid_custom_id")
        if line["method"] != "POST":
            raise InvalidRequest(f"method must be POST, not {str(line['method'])[:40]!r}", param="method", code="invalid_method")
        if line["url"] != endpoint:
            message = f"url must be the batch's endpoint, {endpoint}, not {str(line['url'])[:80]!r}"
            raise InvalidRequest(message, param="url", code="mismatched_endpoint")
        if not isinstance(line["body"], dict):
            raise InvalidRequest("body must be a JSON object", param="body", code="invalid_body")
        return custom_id

    async def answer(self, batch: Batch, line: int, raw: bytes, tries: int) -> LineResult:
        """As of BatchApi."""
        endpoint = self._endpoints[batch.endpoint]
        request_id = new_id(endpoint.id_prefix)
        custom_id, body = await self._backend.side_thread.run(len(raw), self._parts, raw)
        traced, status = Traced(self._backend, request_id, "", endpoint.path, endpoint.operation), 499
        try:
            text = await self._answered(batch, endpoint, body, traced)
            status = 200
        except Exception as error:
            failure = error if isinstance(error, SpringtideError) else internal_error()
            if failure is not error:
                logger.exception("line %d of %s: what comes of it was not foreseen", line, batch.batch_id)
            status, text = failure.http_status, dump(endpoint.error(failure, request_id))
            if _passing(failure, tries):
                raise failure from None
        finally:
            traced.end(str(status))
        response = f'{{"status_code":{status},"request_id":{json.dumps(request_id)},"body":{text}}}'
        return LineResult(line, status == 200, _result(batch, line, custom_id, response, "null"))

    def unanswered(self, batch: Batch, line: int, raw: bytes) -> LineResult:
        """As of BatchApi."""
        error = {"code": "batch_expired", "message": f"this request was not answered within {batch.completion_window}"}
        return LineResult(line, False, _result(batch, line, self._parts(raw)[0], "null", dump(error)))

    async def _answered(self, batch: Batch, endpoint: Endpoint, body: bytes, traced: Traced) -> str:
        """The JSON text of the whole answer."""
        backend = self._backend
        origin = replace(traced.origin, tenant=batch.tenant, key_id=batch.key_id, batch=True)
        call = Call(origin, {}, {}, {})
        ordered = await backend.side_thread.run(len(body), endpoint.order, body, call, backend)
        num_bytes = len(body)
        if isinstance(ordered, Pending):
            num_bytes, make = await ordered.look_up()
            ordered = await backend.side_thread.run(num_bytes, make)
        request = self._idle(ordered)
        if request.cache.named:
            prepared = await backend.begun_with_cache(request, origin, num_bytes)
        else:
            prepared = await backend.side_thread.run(num_bytes, backend.preparer.prepared, request, origin)
        traced.tell(prepared, stream=False)
        of_key = Allowance(batch_tokens_per_minute=batch.tokens_per_minute or None)
        caller = Caller(batch.tenant, batch.key_id, of_key, backend.accounts.allowance(batch.tenant))
        receipt = await backend.accounts.charge(caller).take_tokens(prepared.num_prompt_tokens, "batch_tokens")
        answer = backend.start(replace(prepared, receipt=receipt))
        try:
            whole = await answer.whole()
        finally:
            answer.close()
        if endpoint.after is not None:
            await endpoint.after(ordered, whole)
        return await written(ordered.format.whole(whole))

    @staticmethod
    def _idle(order: Order) -> ApiRequest:
        """What is asked for, in idle capacity. Raises InvalidRequest for what no batch can give."""
        request = order.request
        for name, wanted in (("stream", order.stream), ("background", order.hand_over is not None), ("dry_run", request.cache.dry_run)):
            if wanted:
                raise InvalidRequest(f"{name}: a batch's answers are whole, and come with it", param=name, code="invalid_value")
        return replace(request, terms=replace(request.terms, idle=True))

    def _parts(self, raw: bytes) -> tuple[str, bytes]:
        """The id and the body of a line that has been checked."""
        line = self._read(raw)
        return line["custom_id"], dump(line["body"]).encode()

    def _read(self, raw: bytes) -> dict[str, Any]:
        if has_more_values(raw, self._backend.preparer.bounds.max_values + len(_LINE_FIELDS)):
            raise InvalidRequest("the line has too many numbers, texts, lists and objects", code="too_many_values")
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the line is not valid JSON: {error}", code="invalid_json_line") from None
        try:
            json_value(line)
        except ValueError as error:
            raise InvalidRequest(f"the line {error}", code="invalid_json_line") from None
        if not isinstance(line, dict):
            raise InvalidRequest("the line must be a JSON object", code="invalid_json_line")
        return line


def _passing(error: SpringtideError, tries: int) -> bool:
    """Whether a line that fails so is to be tried again."""
    if error.http_status == 500:
        return tries + 1 < _MOST_TRIES
    return error.http_status in _NOBODYS_FAULT or (error.http_status > 500 and not isinstance(error, DeadlineExceeded))


def _result(batch: Batch, line: int, custom_id: str, response: str, error: str) -> str:
    """A line of the output or of the errors; `response` and `error` are JSON texts."""
    number = json.dumps(f"batch_req_{batch.batch_id.removeprefix('batch-')}_{line}")
    return f'{{"id":{number},"custom_id":{json.dumps(custom_id)},"response":{response},"error":{error}}}'
