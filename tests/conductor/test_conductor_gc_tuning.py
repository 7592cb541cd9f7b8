"""What stays is out of the collector's sight while the cluster stays as it is, and nothing is kept for good that members have left."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from conductor.server.gc_tuning import GcTuner
from tests.support.waiting import until


@dataclass
class _Cluster:
    joined: int = 0
    left: int = 0
    watchers: list[_Watcher] = field(default_factory=list)


class _Watcher:
    """In a cycle, so that only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_a_cluster_that_has_just_changed_is_given_time() -> None:
    cluster = _Cluster()
    tuner = GcTuner(cluster)
    cluster.joined = 10
    tuner.look()
    assert gc.get_freeze_count() == 0
    cluster.joined = 20
    tuner.look()
    assert gc.get_freeze_count() == 0
    tuner.look()
    assert gc.get_freeze_count() > 0


def test_what_the_members_need_is_frozen_once() -> None:
    cluster = _Cluster(joined=10, watchers=[_Watcher() for _ in range(10)])
    tuner = GcTuner(cluster)
    tuner.look()
    tuner.look()
    young = [_Watcher() for _ in range(100)]
    frozen = gc.get_freeze_count()
    tuner.look()
    assert gc.get_freeze_count() <= frozen
    assert len(young) == 100


def test_what_many_members_that_have_gone_left_in_cycles_is_freed() -> None:
    cluster = _Cluster(joined=10, watchers=[_Watcher() for _ in range(10)])
    tuner = GcTuner(cluster)
    tuner.look()
    tuner.look()
    gone = [weakref.ref(watcher) for watcher in cluster.watchers[:5]]
    del cluster.watchers[:5]
    gc.collect()
    assert all(watcher() is not None for watcher in gone), "they were not frozen"
    cluster.left = 5
    tuner.look()
    tuner.look()
    assert all(watcher() is None for watcher in gone)
    assert gc.get_freeze_count() > 0


def test_what_has_come_is_frozen_before_long_whether_the_members_have_a_rest_or_not() -> None:
    for joins in (0, 1):
        cluster = _Cluster(joined=10)
        tuner = GcTuner(cluster)
        tuner.look()
        tuner.look()
        young = [_Watcher() for _ in range(1000)]
        for _ in range(12):
            cluster.joined += joins
            tuner.look()
        assert not {id(one) for one in young} & {id(one) for one in gc.get_objects()}, "those in its sight"
        gc.unfreeze()


@pytest.mark.parametrize("joins", [0, 1])
def test_what_was_frozen_and_has_come_to_be_in_cycles_is_freed_when_it_is_much(joins: int) -> None:
    cluster = _Cluster(joined=10)
    tuner = GcTuner(cluster)
    tuner.look()
    tuner.look()
    much = [_Watcher() for _ in range(gc.get_freeze_count())]
    gone = weakref.ref(much[0])
    for _ in range(12):
        cluster.joined += joins
        tuner.look()
    del much
    gc.collect()
    assert gone() is not None, "it was not frozen"
    for _ in range(12):
        cluster.joined += joins
        tuner.look()
    assert gone() is None
    assert gc.get_freeze_count() > 0


async def test_what_is_young_is_looked_at_by_time() -> None:
    looked_at: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            looked_at.append(info["generation"])

    gc.callbacks.append(note)
    task = asyncio.create_task(GcTuner(_Cluster()).run())
    await until(lambda: len(looked_at) >= 10)
    gc.callbacks.remove(note)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert looked_at[:10] == [0] * 10


async def test_when_it_ends_the_collector_is_as_it_was() -> None:
    thresholds = gc.get_threshold()
    task = asyncio.create_task(GcTuner(_Cluster()).run())
    await asyncio.sleep(0)
    assert gc.get_threshold() != thresholds
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0
