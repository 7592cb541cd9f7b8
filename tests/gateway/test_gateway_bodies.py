"""Bodies: what is too large, too slow or too much at once is refused, however it is written; what fits is not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import string
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from engine.tokenizer.tokenizer import Tokenizer
from gateway import bodies as bodies_module
from gateway.bodies import INLINE_BYTES, Bodies, BodyTimeout, BodyTooLarge, SideThread, has_more_values, parse_body
from gateway.openai.requests import ChatCompletionRequest, CompletionRequest
from gateway.prepare import MAX_STOP_TOKEN_IDS, Bounds
from springtide.errors import InvalidRequest, Overloaded
from tests.support.waiting import until

MAX_BYTES = 100_000


def values_of(document: Any) -> int:
    """Separators and openings that any JSON of it has."""
    if isinstance(document, dict):
        return 1 + len(document) + max(0, len(document) - 1) + sum(map(values_of, document.values()))
    if isinstance(document, list):
        return 1 + max(0, len(document) - 1) + sum(map(values_of, document))
    return 0


DOCUMENTS = st.recursive(
    st.none() | st.integers() | st.text(alphabet=string.punctuation + "aä\n", max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(alphabet='":,[\\{a', max_size=4), inner, max_size=5),
    max_leaves=30,
)


@given(DOCUMENTS)
def test_values_are_counted_as_they_are_whatever_texts_contain(document: Any) -> None:
    raw, count = json.dumps(document).encode(), values_of(document)
    assert not has_more_values(raw, count)
    assert count == 0 or has_more_values(raw, count - 1)


@given(st.binary(max_size=40) | st.text(alphabet='"\\,:[{x', max_size=40).map(str.encode))
def test_counting_ends_for_anything(raw: bytes) -> None:
    has_more_values(raw, 0)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)},
        {"prompt": "x", **{f"a{number}": 1 for number in range(1000)}},
        {"prompt": [[]] * 500_000},
        {"prompt": ["a", {"": 1}] * 500},
        {"prompt": "x", "logit_bias": {"9" * 5000: 1}},
        {"prompt": "x", "logit_bias": {"4294967296": 1}},
    ],
)
def test_what_only_costs_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        parse_body(json.dumps({"model": "m", **body}).encode(), CompletionRequest, 1 << 16)


def test_one_mistake_in_many_messages_is_named_once() -> None:
    body = {"model": "m", "messages": [{"role": "wizard", "content": "x"}] * 10_000}
    with pytest.raises(InvalidRequest, match="wizard") as caught:
        parse_body(json.dumps(body).encode(), ChatCompletionRequest, 1 << 16)
    assert caught.value.param == "messages[0].role"


@pytest.mark.parametrize("filler", ["=", "\x01", "é", "\U0001f600"])
def test_whatever_fits_into_the_context_fits_into_a_body_however_it_is_written(tokenizer: Tokenizer, filler: str) -> None:
    assert tokenizer.most_bytes_a_token is not None
    bounds = Bounds.of(2000, 49152, tokenizer.most_bytes_a_token)
    text = filler * (2000 * tokenizer.most_bytes_a_token // len(filler.encode()))
    body = {"model": "m", "prompt": text, "logit_bias": {str(token): -0.123456789 for token in range(49152)}}
    assert len(json.dumps(body)) <= bounds.max_body_bytes
    assert len(json.dumps({"model": "m", "prompt": [[49000] * 2000] * 16})) <= bounds.max_body_bytes
    assert not has_more_values(json.dumps(body).encode(), bounds.max_values)


# ---- receiving ----


class Client:
    """Sends a body piece by piece."""

    def __init__(self, **headers: str) -> None:
        self._pieces: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope_headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.request = Request({"type": "http", "method": "POST", "headers": scope_headers}, self._pieces.get)

    def send(self, num_bytes: int, more: bool = True) -> None:
        self._pieces.put_nowait({"type": "http.request", "body": b"x" * num_bytes, "more_body": more})


async def take(bodies: Bodies, client: Client) -> int:
    async with bodies.received(client.request) as raw:
        return len(raw)


async def test_a_body_is_held_until_it_is_no_longer_needed() -> None:
    bodies, client = Bodies(MAX_BYTES), Client()
    client.send(50_000)
    client.send(40_000, more=False)
    async with bodies.received(client.request) as raw:
        assert (len(raw), bodies.held_bytes) == (90_000, 90_000)
    assert bodies.held_bytes == 0


async def test_a_body_that_is_too_long_is_refused_when_it_is_announced_or_when_it_has_come() -> None:
    bodies, client = Bodies(MAX_BYTES), Client()
    client.send(60_000)
    client.send(60_000)
    for each in (Client(content_length=str(MAX_BYTES + 1)), client):
        with pytest.raises(BodyTooLarge):
            await take(bodies, each)
    assert bodies.held_bytes == 0


async def test_who_sends_slowly_makes_room_for_others() -> None:
    bodies = Bodies(MAX_BYTES)
    slow = [Client() for _ in range(8)]
    waiting = [asyncio.create_task(take(bodies, client)) for client in slow]
    for client in slow:
        client.send(MAX_BYTES)
    await until(lambda: bodies.held_bytes == 8 * MAX_BYTES)
    quick = Client()
    quick.send(MAX_BYTES, more=False)
    assert await take(bodies, quick) == MAX_BYTES
    with pytest.raises(Overloaded):
        await waiting[0]
    for client in slow[1:]:
        client.send(0, more=False)
    assert await asyncio.gather(*waiting[1:]) == [MAX_BYTES] * 7
    assert bodies.held_bytes == 0


async def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies_module, "PATIENCE_S", 0.05)
    bodies, client = Bodies(MAX_BYTES), Client()
    client.send(100)
    with pytest.raises(BodyTimeout):
        await take(bodies, client)


class Caller:
    """Sends a message that comes as a whole, when it is told to."""

    def __init__(self) -> None:
        self.sent: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    async def read(self) -> bytes | None:
        return await self.sent


async def take_message(bodies: Bodies, caller: Caller) -> int:
    async with bodies.read(caller.read, MAX_BYTES) as raw:
        return len(raw or b"")


async def test_a_message_on_its_way_counts_as_the_largest_and_then_as_it_is() -> None:
    bodies, caller = Bodies(MAX_BYTES), Caller()
    taking = asyncio.create_task(take_message(bodies, caller))
    await until(lambda: bodies.held_bytes == MAX_BYTES)
    caller.sent.set_result(b"x" * 50_000)
    assert await taking == 50_000 and bodies.held_bytes == 0
    async with bodies.read(caller.read, MAX_BYTES):
        assert bodies.held_bytes == 50_000


async def test_messages_that_come_slowly_make_room_and_those_that_are_there_do_not() -> None:
    bodies = Bodies(MAX_BYTES)
    slow = [Caller() for _ in range(9)]
    waiting = [asyncio.create_task(take_message(bodies, caller)) for caller in slow]
    with pytest.raises(Overloaded):
        await waiting[0]
    async with contextlib.AsyncExitStack() as held:
        for _ in range(8):
            there = Caller()
            there.sent.set_result(b"x" * MAX_BYTES)
            await held.enter_async_context(bodies.read(there.read, MAX_BYTES))
        late = Client()
        late.send(MAX_BYTES, more=False)
        with pytest.raises(Overloaded):
            await take(bodies, late)
    assert all(isinstance(error, Overloaded) for error in await asyncio.gather(*waiting[1:], return_exceptions=True))
    assert bodies.held_bytes == 0


async def test_a_message_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies_module, "PATIENCE_S", 0.05)
    monkeypatch.setattr(bodies_module, "LEAST_BYTES_A_S", 1 << 30)
    bodies = Bodies(MAX_BYTES)
    with pytest.raises(BodyTimeout):
        await take_message(bodies, Caller())
    assert bodies.held_bytes == 0


# ---- preparing ----


@pytest.fixture
async def side_thread() -> AsyncIterator[SideThread]:
    side_thread = SideThread()
    yield side_thread
    side_thread.close()


async def test_the_shortest_waiting_request_is_next(side_thread: SideThread) -> None:
    free, done = threading.Event(), []

    def work(name: str) -> None:
        free.wait(10)
        done.append(name)

    sizes = {"first": 10**6, "large": 10**7, "cancelled": 5000, "small": 10**4, "middle": 10**5}
    tasks = {name: asyncio.create_task(side_thread.run(size, work, name)) for name, size in sizes.items()}
    await asyncio.sleep(0)
    tasks["cancelled"].cancel()
    free.set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert done == ["first", "small", "middle", "large"]


async def test_small_requests_wait_for_nobody(side_thread: SideThread) -> None:
    free = threading.Event()
    large = asyncio.create_task(side_thread.run(INLINE_BYTES + 1, free.wait, 10))
    await asyncio.sleep(0)
    assert await side_thread.run(INLINE_BYTES, lambda: "at once") == "at once"
    free.set()
    assert await large


async def test_what_goes_wrong_on_the_thread_is_told_and_the_next_goes_on(side_thread: SideThread) -> None:
    with pytest.raises(ZeroDivisionError):
        await side_thread.run(10**5, lambda: 1 / 0)
    assert await side_thread.run(10**5, lambda: 5) == 5
