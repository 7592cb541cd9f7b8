"""The routes of OpenAI's Responses API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.answer import ApiBackend, message_for_client
from gateway.api_request import ApiRequest, Conversation, Speaker
from gateway.bodies import parse_body
from gateway.described import FLAG, TEXT, operation
from gateway.exchange import Call, Endpoint, Order, Pending, exchange, read_permitted, server_sent
from gateway.openai.answers import error_body, token_json
from gateway.openai.described import INPUT_TOKENS, ITEM, RESPONSE, deleted, listed
from gateway.openai.pages import ORDER, limit_of, order_of
from gateway.openai.responses_body import InputTokensRequest, PromptRequest, ResponseRequest
from gateway.openai.responses_format import Json, ResponseFormat
from gateway.openai.responses_items import Item, ItemIds
from gateway.openai.responses_jobs import ResponseJobs
from gateway.openai.responses_store import EVENTS_KEPT_S, ResponseNotFound, ResponseStore, Stored
from gateway.output import Answer
from gateway.prepare import PreparedRequest, Preparer
from gateway.records import RecordTooLarge
from springtide.errors import InvalidRequest, SpringtideError, Unavailable

PATH = "/v1/responses"
BODIES = (ResponseRequest, InputTokensRequest)
"""For the API's own description."""
_PAGE, _MOST_ITEMS = 20, 100
_MOST_EVENTS = (1 << 31) - 1
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_KEEP_ALIVE = b": waiting\n\n"


def routes(backend: ApiBackend) -> APIRouter:
    router = APIRouter()
    api = _ResponsesApi(backend)

    @router.post(PATH, openapi_extra=operation(RESPONSE, ResponseRequest, events=True))
    async def create(request: Request) -> Response:
        return await exchange(backend, request, api.endpoint)

    @router.post(f"{PATH}/input_tokens", openapi_extra=operation(INPUT_TOKENS, InputTokensRequest))
    async def input_tokens(request: Request) -> Json:
        return await api.input_tokens(request)

    events = {"stream": FLAG, "starting_after": {"type": "integer", "minimum": 0, "maximum": _MOST_EVENTS}}

    @router.get(f"{PATH}/{{response_id}}", openapi_extra=operation(RESPONSE, query=events, events=True))
    async def retrieve(request: Request, response_id: str) -> Response:
        return await api.retrieve(request.state.tenant, response_id, request.query_params)

    @router.delete(f"{PATH}/{{response_id}}", openapi_extra=operation(deleted("response")))
    async def delete(request: Request, response_id: str) -> Json:
        await api.store.delete(request.state.tenant, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post(f"{PATH}/{{response_id}}/cancel", openapi_extra=operation(RESPONSE))
    async def cancel(request: Request, response_id: str) -> Json:
        return await api.cancel(request.state.tenant, response_id)

    items = {"limit": limit_of(_MOST_ITEMS), "order": ORDER, "after": TEXT}

    @router.get(f"{PATH}/{{response_id}}/input_items", openapi_extra=operation(listed(ITEM), query=items))
    async def input_items(request: Request, response_id: str) -> Json:
        return await api.input_items(request.state.tenant, response_id, request.query_params)

    return router


def endpoint(backend: ApiBackend) -> Endpoint:
    """For answers of which no HTTP request waits."""
    return _ResponsesApi(backend).endpoint


@dataclass(frozen=True, slots=True)
class _Kept(Order):
    """An order whose answer is to be kept."""

    tenant: str = ""
    input_text: str = "[]"
    """JSON text of its own input's items."""
    chain: tuple[str, ...] = ()
    """The responses before it."""

    def stored(self, response: Json) -> Stored:
        return Stored(response, self.input_text, self.chain)


@dataclass(frozen=True, slots=True)
class _Found:
    """What a request refers to."""

    earlier: Sequence[Stored] = ()
    """The conversation before it."""
    owners: Mapping[str, Stored] = field(default_factory=dict)
    """The responses that have the items that it refers to, by the items' ids."""

    @property
    def num_bytes(self) -> int:
        return sum(len(stored.input_text) for stored in (*self.earlier, *self.owners.values()))


_NOTHING = _Found()


class _ResponsesApi:
    """What is behind the routes."""

    def __init__(self, backend: ApiBackend) -> None:
        self._backend = backend
        settings = backend.server
        self.store = ResponseStore(backend.valkey, backend.cluster, settings.responses_ttl_s, settings.responses_size)
        self.jobs = ResponseJobs(self.store, backend.background)
        self.endpoint = Endpoint(PATH, "resp", ResponseRequest, self._read, error_body, after=self._keep)

    # ---- a new one ----

    def _read(self, raw: bytes, call: Call, backend: ApiBackend) -> Order | Pending:
        body = parse_body(raw, ResponseRequest, backend.preparer.bounds.max_values)
        backend.preparer.check_model(body.model)
        if not _refers(body):
            return self._order(body, call, _NOTHING)

        async def look_up() -> tuple[int, Callable[[], Order]]:
            found = await self._found(body, call.origin.tenant)
            return len(raw) + found.num_bytes, lambda: self._order(body, call, found)

        return Pending(look_up)

    async def _found(self, body: PromptRequest, tenant: str) -> _Found:
        owners = await self.store.owners_of(tenant, _references(body))
        if body.previous_response_id is None:
            return _Found((), owners)
        return _Found(await self.store.conversation(tenant, body.previous_response_id), owners)

    def _order(self, body: ResponseRequest, call: Call, found: _Found) -> Order:
        response_id = call.origin.request_id.replace("-", "_", 1)
        own = ItemIds(response_id).named([_referenced(item, found.owners) for item in body.input])
        request, earlier = self._request(body, found, own), found.earlier
        tokenizer = self._backend.tokenizer
        entry = (lambda placed: token_json(placed, tokenizer)) if body.wants_logprobs else None
        defaults = self._backend.preparer.default_sampling
        shown = body.shown() | {
            name: defaults.get(name, 1.0) if (value := getattr(body, name)) is None else value for name in ("temperature", "top_p")
        }
        written = ResponseFormat(call.origin.request_id, response_id, shown, len(own), entry)
        chain = (*earlier[-1].chain, str(earlier[-1].response["id"])) if earlier else ()
        if not body.store:
            return Order(request, body.stream, written)
        input_text = json.dumps(own, separators=(",", ":"))
        order = _Kept(request, body.stream, written, None, call.origin.tenant, input_text, chain)
        if not body.background:
            return order
        self.jobs.check_room(call.origin.tenant)
        return replace(order, hand_over=lambda prepared, on_end: self._begin(order, prepared, on_end))

    def _request(self, body: PromptRequest, found: _Found, own: Sequence[Item]) -> ApiRequest:
        request = body.api_request([*(item for stored in found.earlier for item in stored.items), *own])
        if body.truncation == "auto":
            return _fitted(request, self._backend.preparer, instructed=body.instructions is not None)
        return request

    async def input_tokens(self, request: Request) -> Json:
        preparer = self._backend.preparer

        def parse(raw: bytes) -> tuple[InputTokensRequest, int]:
            return parse_body(raw, InputTokensRequest, preparer.bounds.max_values), len(raw)

        body, num_bytes = await read_permitted(self._backend, request, parse)
        preparer.check_model(body.model)
        found = await self._found(body, request.state.tenant) if _refers(body) else _NOTHING

        def count() -> int:
            own = [_referenced(item, found.owners) for item in body.input]
            (tokens,) = preparer.tokens(self._request(body, found, own))
            return len(tokens)

        num_tokens = await self._backend.side_thread.run(num_bytes + found.num_bytes, count)
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    async def _keep(self, order: Order, answer: Answer) -> None:
        if not isinstance(order, _Kept):
            return
        assert isinstance(order.format, ResponseFormat), "the orders of this API are written in its own words"
        try:
            await self.store.keep(order.tenant, order.stored(order.format.completed(answer)))
        except (Unavailable, RecordTooLarge):
            # The answer is there: it is given, and says that it is not stored.
            order.format.not_stored()

    async def _begin(self, order: _Kept, prepared: PreparedRequest, on_end: Callable[[], None]) -> Response:
        written = order.format
        assert isinstance(written, ResponseFormat), "the orders of this API are written in its own words"
        # What can never succeed is refused at once, as it is in the foreground.
        if not self._backend.grammars.good(prepared.sampling.grammar):
            await self._backend.grammars.check(prepared.sampling.grammar, prepared.grammar_field, prepared.tenant)
        await self.jobs.begin(prepared.tenant, order.stored(written.response), written, lambda: self._backend.start(prepared))
        if order.stream:
            return _Followed(self._events(prepared.tenant, written.response_id, after=-1), on_end)
        on_end()
        return JSONResponse(written.response)

    # ---- those that there are ----

    async def retrieve(self, tenant: str, response_id: str, query: Mapping[str, str]) -> Response:
        after = _number(query, "starting_after", -1, 0, _MOST_EVENTS)
        stored = await self.store.get(tenant, response_id)
        stream = query.get("stream", "false").lower()
        if stream not in _FLAGS:
            raise InvalidRequest(f"stream must be true or false, not {stream[:100]!r}", param="stream", code="invalid_value")
        if not _FLAGS[stream]:
            return JSONResponse(stored.response)
        if not await self.store.has_events(tenant, response_id):
            message = (
                f"stream: the events of {response_id} are not there; kept are those of background responses, "
                f"{EVENTS_KEPT_S:g} s beyond the last one"
            )
            raise InvalidRequest(message, param="stream", code="no_events")
        accounts = self._backend.accounts
        accounts.enter(tenant)
        return _Followed(self._events(tenant, response_id, after), lambda: accounts.leave(tenant))

    async def cancel(self, tenant: str, response_id: str) -> Json:
        stored = await self.store.get(tenant, response_id)
        if not stored.response["background"]:
            message = f"response_id: {response_id} was not made in the background; close its connection to end it"
            raise InvalidRequest(message, param="response_id", code="not_in_background")
        return (await self.jobs.cancel(tenant, response_id)).response

    async def input_items(self, tenant: str, response_id: str, query: Mapping[str, str]) -> Json:
        limit = _number(query, "limit", _PAGE, 1, _MOST_ITEMS)
        order = order_of(query)
        stored = await self.store.get(tenant, response_id)
        items = await self._backend.side_thread.run(len(stored.input_text), lambda: stored.input)
        if order == "desc":
            items.reverse()
        if after := query.get("after", ""):
            place = next((number for number, item in enumerate(items) if item["id"] == after), None)
            if place is None:
                raise InvalidRequest(f"after: {after[:100]!r} is no item of {response_id}", param="after", code="invalid_value")
            del items[: place + 1]
        page = items[:limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
        return {"object": "list", "data": page, **ends, "has_more": len(items) > limit}

    async def _events(self, tenant: str, response_id: str, after: int) -> AsyncIterator[bytes]:
        position = after
        try:
            async for events, last in self.store.events(tenant, response_id, after):
                position += len(events)
                yield b"".join(events) or _KEEP_ALIVE
                if last:
                    return
            # Its gateway has gone before the last one, or it was ended by another one.
            response = (await self.store.get(tenant, response_id)).response
        except SpringtideError as error:
            # It was deleted, or Valkey is away: what has begun is ended by an event.
            event = {"code": error.code, "message": message_for_client(error), "param": error.param}
            yield server_sent({"type": "error", "sequence_number": position + 1, **event}, "error")
            return
        status = response["status"]
        kind = f"response.{status if status in ('completed', 'failed') else 'incomplete'}"
        yield server_sent({"type": kind, "sequence_number": position + 1, "response": response}, kind)


class _Followed(StreamingResponse):
    """The events of a response in the background."""

    media_type = ResponseFormat.media_type

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def _references(body: PromptRequest) -> list[str]:
    return [item["id"] for item in body.input if item["type"] == "item_reference"]


def _refers(body: PromptRequest) -> bool:
    return body.previous_response_id is not None or bool(_references(body))


def _referenced(item: Item, owners: Mapping[str, Stored]) -> Item:
    if item["type"] != "item_reference":
        return item
    for found in owners[item["id"]].items:
        if found["id"] == item["id"]:
            return found
    raise ResponseNotFound(f"input: item {item['id'][:100]!r} is not stored here", param="input", code="item_not_found")


def _fitted(request: ApiRequest, preparer: Preparer, *, instructed: bool) -> ApiRequest:
    """`request` without as many turns from the beginning of the conversation as it takes to fit, instructions kept."""
    conversation = request.prompt
    assert isinstance(conversation, Conversation), "a response answers a conversation"
    head, messages = conversation.messages[:instructed], conversation.messages[instructed:]
    turns = [number for number, message in enumerate(messages) if message.speaker is Speaker.USER]
    begins = [0, *(number for number in turns if number)]

    def without(begin: int) -> ApiRequest:
        return replace(request, prompt=replace(conversation, messages=(*head, *messages[begin:])))

    low, high = 0, len(begins) - 1
    while low < high:
        middle = (low + high) // 2
        if _fits(without(begins[middle]), preparer):
            high = middle
        else:
            low = middle + 1
    return without(begins[low])


def _fits(request: ApiRequest, preparer: Preparer) -> bool:
    try:
        (tokens,) = preparer.tokens(request)
    except InvalidRequest as error:
        if error.code != "context_length_exceeded":
            raise
        return False
    return len(tokens) + (request.max_tokens or 1) <= preparer.context_length


def _number(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not text.isdecimal() or len(text) > 10 or not least <= int(text) <= most:
        raise InvalidRequest(f"{name} must be a number from {least} to {most}, not {text[:100]!r}", param=name, code="invalid_value")
    return int(text)
