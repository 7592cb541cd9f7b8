"""What clients send is answered by a real cluster to which nothing happens: the right requests as ever, the wrong ones with 400."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.chaos.checks import violations
from tests.chaos.client import Clients
from tests.chaos.cluster import ClusterUnderTest
from tests.chaos.history import History, Limits
from tests.chaos.observe import Observer
from tests.chaos.reference import calm_answers
from tests.chaos.shapes import MODEL, Shape
from tests.chaos.workload import KINDS, Item, catalogue, wrong_requests
from tests.support.models import make_tiny_llama

GATEWAY = "gateway-0"
CALM = Shape("plain").calm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterUnderTest]:
    directory = tmp_path_factory.mktemp("calm")
    with ClusterUnderTest(CALM, make_tiny_llama(directory / "model", **MODEL), directory) as cluster:
        yield cluster


@pytest.fixture
async def clients(cluster: ClusterUnderTest) -> AsyncIterator[Clients]:
    clients = Clients(cluster.urls, time.monotonic, Limits().end_s)
    yield clients
    await clients.close()


async def test_every_wrong_request_is_refused_with_400(clients: Clients) -> None:
    items = [Item(str(number), "invalid", *made) for number, made in enumerate(wrong_requests(random.Random(1)))]
    exchanges = await asyncio.gather(*(clients.send("test", GATEWAY, item) for item in items))
    assert [exchange.item for exchange in exchanges if exchange.status != 400] == []


async def test_an_observer_sees_that_a_calm_cluster_holds_nothing_and_its_stores_are_sound(cluster: ClusterUnderTest) -> None:
    observer = Observer(cluster, time.monotonic)
    try:
        point = await observer.calm_point(ssd=False)
    finally:
        observer.close()
    assert (point.leaks, point.not_whole) == ({}, None)
    assert point.verdicts == {"prefill-0": "sound", "decode-0": "sound"}


async def test_a_calm_cluster_answers_every_kind_of_request_twice_alike(clients: Clients) -> None:
    items = catalogue(seed=1)[: len(KINDS)]
    answers = await calm_answers(clients, GATEWAY, items)
    clients.exchanges.clear()
    for item in items:
        await clients.send("test", GATEWAY, item)
    past = History(CALM.topology, Limits(), items, answers, clients.exchanges)
    assert violations(past) == []
    told = {item.key for item in items if any(choice.text for choice in answers[item.key].choices.values())}
    assert {item.kind for item in items if item.key not in told} <= {"invalid", "stopped"}, "there is something to compare"
