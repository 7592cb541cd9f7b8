"""What the benchmark of many instances and of a leader's death is made of."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from benchmarks import fleet, joins
from benchmarks.fake_nodes import Engine
from benchmarks.fleet import Answer, Death, Joined, Use
from benchmarks.joins import AtOnce, Joins
from benchmarks.live_cluster import LiveCluster, instance_id
from benchmarks.streams import StreamConnection
from springtide.protocol.instances import Role


def watcher(takes: bool = True) -> Mock:
    return Mock(spec=StreamConnection, calls=True, send=Mock(return_value=takes))


def test_an_engine_reports_the_same_to_every_conductor_that_watches_it() -> None:
    engine = Engine(instance_id(Role.DECODE, 0), LiveCluster(1, 3).reports_of(Role.DECODE, 0), idle_turn=0)
    assert engine.report() == 0
    leader, standby = watcher(), watcher()
    for each in (leader, standby):
        engine.watched_by(each)
    assert engine.report() == 2
    assert leader.send.call_args == standby.send.call_args


def test_an_engine_that_a_conductor_watches_no_more_reports_to_the_others() -> None:
    engine = Engine(instance_id(Role.DECODE, 0), LiveCluster(1, 0).reports_of(Role.DECODE, 0), idle_turn=0)
    gone, slow = watcher(), watcher(takes=False)
    for each in (gone, slow):
        engine.watched_by(each)
    gone.calls, gone.send.return_value = False, False
    assert engine.watchers == [slow]
    assert engine.report() == 0, "who takes nothing in is held back"
    engine.watched_by(new := watcher())
    assert engine.watchers == [slow, new] and engine.report() == 1


ANSWERS = (
    Answer(9.0, 9.1, epoch=1),
    Answer(11.5, 11.6, epoch=1),  # in calm
    Answer(11.9, 15.2, epoch=2),  # asked before the death and not answered
    Answer(12.5, 15.0, epoch=2),  # the successor's first decision
    Answer(13.0, 14.9, epoch=0),  # given up
    Answer(14.9, 15.1, epoch=2),
    Answer(15.05, 15.2, epoch=2),  # asked when it was over
)


def test_who_waits_is_whom_the_dead_leader_did_not_answer_or_who_asked_before_its_successor_decided() -> None:
    death = fleet.death_of(ANSWERS, epoch=1, began=11.0, killed_at=12.0, known_s=3.5, restarted_s=4.0)
    assert death.decided_s == pytest.approx(3.0)
    assert death.waits_s == pytest.approx([3.3, 2.5, 1.9, 0.2])
    assert death.calm_s == pytest.approx([0.1])
    assert death.not_placed == 1


def test_the_wait_of_all_kills_is_held_to_the_lease() -> None:
    deaths = [Death(2.5, 2.6, 5.0, [0.5, 2.5], [0.001, 0.002], 0), Death(2.0, 2.1, 5.5, [1.0, 2.0], [0.001], 1)]
    rows = {row.row: row for row in fleet.death_rows(deaths)}
    (held,) = [row for row in rows.values() if row.wanted is not None]
    assert (held.peer, held.peer_name, held.met) == (fleet.LEASE_S, "the lease", True)
    assert rows["longest wait of who asks while nobody decides"].ours == 2.5
    assert rows["questions that waited, over all kills"].ours == 4
    assert rows["questions that were not placed"].ours == 1
    assert rows["from the leader's death to its successor's first decision"].spread == (2.0, 2.5)


def test_machines_that_join_alone_and_at_once_are_told_apart() -> None:
    runs = [
        Joins([10.0, 30.0, 20.0], 5.0, [0.7], [0.2], AtOnce(told, told + 1.0, failed, 6.0, 25.0)) for told, failed in ((9.0, 0), (11.0, 4))
    ]
    rows = {(row.row, row.case): row for row in joins.rows(runs, 1000)}
    assert len(rows) == 9 and {row.rounds for row in rows.values()} == {2}
    cost = "processor time of the head for a machine that joins"
    assert (rows[cost, "alone"].ours, rows[cost, "1,000 machines at once"].ours) == (5.0, 6.0)
    assert rows["from a machine's first question to the join service until it is told everything", "alone"].ours == 20.0
    assert rows["until all were told everything", "1,000 machines at once"].spread == (9.0, 11.0)
    assert rows["tries that failed and were made again", "1,000 machines at once"].ours == 2


def test_every_headline_is_a_row() -> None:
    deaths = [Death(2.5, 2.6, 5.0, [0.5, 2.5], [0.001, 0.002], 0)]
    use = Use(0.5, 0.4, 0.3, 20_000.0, 0.0, 8000.0, 9000.0)
    rows = [*fleet.join_rows([Joined(0.1, 3.0, 3.5)]), *fleet.death_rows(deaths), *fleet.use_rows(fleet.AT_WORK, [use])]
    assert set(fleet.HEADLINES) <= {row.label for row in rows}
