"""Responses that are kept: in Valkey, so that every gateway has them, a tenant's apart from the others'. With those in the making goes a
lease of the gateway that makes them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio as redis
from redis.exceptions import ResponseError

from gateway.openai.responses_format import TERMINAL
from gateway.openai.responses_items import Item, response_of
from gateway.records import Records
from springtide.errors import InvalidRequest, Unavailable
from springtide.valkey import asked

Json = dict[str, Any]

LEASE_S = 15.0
"""How long a response is in the making after its gateway was last heard of."""
RENEW_S = 2.0
EVENTS_KEPT_S = 600.0
"""After the last one."""
MOST_EVENT_BYTES = 8 << 20
"""Of one response's events."""
MAX_TURNS = 1024
"""Of a conversation."""
MOST_TRIES, AGAIN_S = 8, 0.5
"""How often Valkey is asked for what must not be missed, and the pause after it could not be: it may be away for a moment, and after the
machine stood still no answer has come in time."""
_EVENTS_AT_ONCE = 256
_BLOCK_MS = 1000
_GONE = {"code": "server_error", "message": "the gateway that made this response is gone; ask again"}


class ResponseNotFound(InvalidRequest):
    http_status = 404


@dataclass(frozen=True, slots=True)
class Stored:
    """A response as it is kept."""

    response: Json
    """Without log-probabilities."""
    input_text: str
    """JSON text of its own input's items, each with an id."""
    chain: tuple[str, ...]
    """The responses before it in its conversation, the first one first."""

    @property
    def input(self) -> list[Item]:
        return list(json.loads(self.input_text))

    @property
    def items(self) -> list[Item]:
        """What it adds to the conversation."""
        return [*self.input, *self.response["output"]]

    @property
    def in_progress(self) -> bool:
        return self.response["status"] not in TERMINAL

    def value(self) -> Json:
        return {"response": self.response, "input": self.input_text, "chain": list(self.chain)}

    @classmethod
    def of(cls, value: Json) -> Stored:
        return cls(value["response"], value["input"], tuple(value["chain"]))


class ResponseStore:
    """The responses of all tenants. Raises Unavailable while Valkey is away."""

    def __init__(self, valkey: redis.Redis, cluster: str, ttl_s: float, most_bytes: int) -> None:
        """They live `ttl_s` from when they were last used; those of a tenant have at most `most_bytes`, beyond which the one goes that has
        been unused for longest."""
        self._valkey = valkey
        self._events = f"{cluster}:response-events"
        self._ttl_s = ttl_s
        self._responses = Records(valkey, cluster, "response", most_bytes=most_bytes)
        self._runs = Records(valkey, cluster, "response-run")

    # ---- responses ----

    async def keep(self, tenant: str, stored: Stored) -> None:
        """A new one. Raises RecordTooLarge."""
        await self._responses.create(tenant, stored.response["id"], stored.value(), time.time(), self._ttl_s)

    async def get(self, tenant: str, response_id: str, param: str = "response_id") -> Stored:
        """As it is now; one whose gateway is gone has failed. Raises ResponseNotFound, which names `param`."""
        value = await self._responses.get(tenant, response_id)
        if value is None:
            raise _not_found(response_id, param)
        stored = Stored.of(value)
        if not stored.in_progress or await self._runs.get(tenant, response_id) is not None:
            return stored
        # It may have ended between the two questions.
        return await self.end(tenant, response_id, {"status": "failed", "error": _GONE})

    async def end(self, tenant: str, response_id: str, changes: Json) -> Stored:
        """As it is once it has ended with these changes, or in another way before. Raises ResponseNotFound."""

        def ended(value: Json) -> Json | None:
            return {**value, "response": {**value["response"], **changes}} if Stored.of(value).in_progress else None

        value = await self._responses.update(tenant, response_id, ended, self._ttl_s)
        if value is None:
            raise _not_found(response_id)
        return Stored.of(value)

    async def add_output(self, tenant: str, response_id: str, changes: Json) -> None:
        """To one that has been cancelled: how far it came."""

        def added(value: Json) -> Json | None:
            response = value["response"]
            return {**value, "response": {**response, **changes}} if response["status"] == "cancelled" else None

        await self._responses.update(tenant, response_id, added, self._ttl_s)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises ResponseNotFound."""
        await self.cancel_run(tenant, response_id)
        await asked(self._valkey.delete(self._events_key(tenant, response_id)))
        if not await self._responses.delete(tenant, response_id):
            raise _not_found(response_id)

    async def conversation(self, tenant: str, response_id: str) -> list[Stored]:
        """All responses up to this one, the first one first, which are used by it. Raises ResponseNotFound, and InvalidRequest when the
        conversation cannot go on from here."""
        last = await self.get(tenant, response_id, "previous_response_id")
        if last.response["status"] not in ("completed", "incomplete"):
            message = f"previous_response_id: {response_id} is {last.response['status']}, and has no answer to go on from"
            raise InvalidRequest(message, param="previous_response_id", code="invalid_value")
        if len(last.chain) >= MAX_TURNS:
            message = f"previous_response_id: the conversation has {MAX_TURNS} responses already; begin anew with its items as input"
            raise InvalidRequest(message, param="previous_response_id", code="too_many_turns")
        earlier = await self._responses.get_all(tenant, last.chain)
        missing = next((found for found, value in zip(last.chain, earlier, strict=True) if value is None), None)
        if missing is not None:
            raise _not_found(missing, "previous_response_id")
        await self._responses.refresh(tenant, [*last.chain, response_id], time.time(), self._ttl_s)
        return [*(Stored.of(value) for value in earlier if value is not None), last]

    async def owners_of(self, tenant: str, item_ids: Iterable[str]) -> dict[str, Stored]:
        """The stored responses that have these items, by the items' ids. Raises ResponseNotFound."""
        wanted = {item_id: response_of(item_id) or "" for item_id in item_ids}
        names = sorted(set(wanted.values()) - {""})
        values = dict(zip(names, await self._responses.get_all(tenant, names), strict=True))
        owners = {}
        for item_id, name in wanted.items():
            value = values.get(name)
            if value is None:
                raise _not_found(item_id, "input")
            owners[item_id] = Stored.of(value)
        return owners

    # ---- those in the making ----

    async def begin_run(self, tenant: str, response_id: str) -> None:
        await self._runs.create(tenant, response_id, {"cancelled": False}, time.time(), LEASE_S)

    async def renew_run(self, tenant: str, response_id: str) -> bool:
        """Whether it is still wanted. Its events, of which there may be none for long, are kept meanwhile."""
        await asked(self._valkey.pexpire(self._events_key(tenant, response_id), round(EVENTS_KEPT_S * 1000)))
        run = await self._runs.update(tenant, response_id, dict, LEASE_S)
        if run is None:
            # Held up for longer than the lease: who asked in between was told that it has failed.
            return False
        return not run["cancelled"]

    async def cancel_run(self, tenant: str, response_id: str) -> None:
        """Its gateway learns of it when it renews the lease."""
        await self._runs.update(tenant, response_id, lambda _: {"cancelled": True}, LEASE_S)

    async def end_run(self, tenant: str, response_id: str) -> None:
        await self._runs.delete(tenant, response_id)

    # ---- their events ----

    async def add_events(self, tenant: str, response_id: str, events: Sequence[bytes], first_number: int, last: bool) -> None:
        """Events with the sequence numbers from `first_number` on. After the last one, none come. May be done again: those that are there
        already stay as they are."""
        key = self._events_key(tenant, response_id)
        async with self._valkey.pipeline(transaction=False) as pipeline:
            for number, event in enumerate(events, first_number):
                ends = last and number == first_number + len(events) - 1
                pipeline.xadd(key, {"event": event, "last": int(ends)}, id=f"{number + 1}-0")
            pipeline.pexpire(key, round(EVENTS_KEPT_S * 1000))
            for added in await asked(pipeline.execute(raise_on_error=False)):
                if isinstance(added, ResponseError) and "equal or smaller" not in str(added):
                    raise Unavailable(f"Valkey takes no event: {added}", code="records_unreachable")

    async def has_events(self, tenant: str, response_id: str) -> bool:
        return bool(await asked(self._valkey.exists(self._events_key(tenant, response_id))))

    async def events(self, tenant: str, response_id: str, after: int) -> AsyncIterator[tuple[list[bytes], bool]]:
        """Its events after the one of this sequence number (-1: all), as they come, and whether the last one is among them; none once a
        second in which none have come. They end before the last one when its gateway does. Raises ResponseNotFound when it is deleted
        meanwhile."""
        key, position, tries = self._events_key(tenant, response_id), f"{after + 1}-0", 0
        while True:
            try:
                found = await asked(self._valkey.xread({key: position}, count=_EVENTS_AT_ONCE, block=_BLOCK_MS))
                over = not found and await self._is_over(tenant, response_id)
                tries = 0
            except Unavailable:
                if (tries := tries + 1) == MOST_TRIES:
                    raise
                found, over = None, False
                await asyncio.sleep(AGAIN_S)
            if found:
                ((_, entries),) = found
                position = entries[-1][0]
                yield [fields[b"event"] for _, fields in entries], entries[-1][1][b"last"] == b"1"
                continue
            yield [], False
            if over:
                return

    async def _is_over(self, tenant: str, response_id: str) -> bool:
        """Whether no event will come."""
        return not (await self.get(tenant, response_id)).in_progress and await self._runs.get(tenant, response_id) is None

    def _events_key(self, tenant: str, response_id: str) -> str:
        return f"{self._events}:{len(tenant)}:{tenant}:{response_id}"


def _not_found(response_id: str, param: str = "response_id") -> ResponseNotFound:
    message = f"{param}: {response_id[:100]!r} is not stored here: it has expired, was deleted, or never was"
    return ResponseNotFound(message, param=param, code="response_not_found")
