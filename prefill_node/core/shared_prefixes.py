"""What several prompts of an engine begin with is computed by the one that came first; those that come meanwhile wait until it is in the
store, and take it from there. Pure: no I/O, no clock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prefill_node.core.attempt import PrefillAttempt
from springtide.ids import AttemptId, BlockKey


class Underway(NamedTuple):
    """The beginning of a prompt that another one computes."""

    leader_id: AttemptId
    blocks: int
    """That both begin with."""
    committed: int
    """Of these, those that are in the store already, or were when it was looked last."""


@dataclass(slots=True)
class _Leader:
    keys: tuple[BlockKey, ...]
    idle: bool
    committed: int
    followers: dict[AttemptId, tuple[PrefillAttempt, int]] = field(default_factory=dict)
    """With the blocks that each waits for."""


class SharedPrefixes:
    """Who computes what, and who waits for it. Any attempt has one part of the three at most: it leads, from when it asks for slots until
    all its blocks are committed; it follows a leader; or it is ready to go on."""

    def __init__(self) -> None:
        self._leaders: dict[AttemptId, _Leader] = {}
        self._leader_of: dict[AttemptId, _Leader] = {}
        """By follower."""
        self._held: dict[AttemptId, int] = {}
        """Blocks that were waited for, and are in the store now: of those that have gone on, and do not lead yet."""
        self._ready: list[AttemptId] = []

    def __contains__(self, attempt_id: AttemptId) -> bool:
        """Whether it follows one."""
        return attempt_id in self._leader_of

    def longest(self, attempt_id: AttemptId, keys: tuple[BlockKey, ...], idle: bool) -> Underway | None:
        """Of a prompt with these keys, the longest beginning that is being computed here. What is in `idle` capacity counts for its like
        alone."""
        found = None
        for leader_id, leader in self._leaders.items():
            place = leader.committed
            if leader_id == attempt_id or (leader.idle and not idle) or keys[place : place + 1] != leader.keys[place : place + 1]:
                continue
            blocks = _num_common(keys, leader.keys)
            if blocks > place and (found is None or blocks > found.blocks):
                found = Underway(leader_id, blocks, max(leader.committed, self._held.get(attempt_id, 0)))
        return found

    def follow(self, attempt: PrefillAttempt, underway: Underway) -> None:
        """The attempt waits for that."""
        self._held.pop(attempt.attempt_id, None)
        leader = self._leaders[underway.leader_id]
        leader.followers[attempt.attempt_id] = attempt, underway.blocks
        self._leader_of[attempt.attempt_id] = leader

    def lead(self, attempt_id: AttemptId, keys: tuple[BlockKey, ...], idle: bool) -> None:
        """The attempt computes all of its prompt that is not in the store yet."""
        self._leaders[attempt_id] = _Leader(keys, idle, self._held.pop(attempt_id, 0))

    def followers(self, leader_id: AttemptId) -> Iterable[tuple[PrefillAttempt, int]]:
        """With the blocks that each waits for."""
        leader = self._leaders.get(leader_id)
        return () if leader is None else leader.followers.values()

    def committed(self, attempt_id: AttemptId, blocks: int) -> None:
        """So many of the leader's blocks are in the store: who waited for no more is ready."""
        leader = self._leaders.get(attempt_id)
        if leader is None or blocks <= leader.committed:
            return
        leader.committed = blocks
        for follower_id, (_, awaited) in list(leader.followers.items()):
            if awaited <= blocks:
                self._let_go(leader, follower_id, awaited)

    def leave(self, attempt_id: AttemptId) -> None:
        """The attempt computes or awaits nothing any more. Its followers are ready: to look for another one, or to lead."""
        self._held.pop(attempt_id, None)
        followed = self._leader_of.pop(attempt_id, None)
        if followed is not None:
            del followed.followers[attempt_id]
        leader = self._leaders.pop(attempt_id, None)
        if leader is not None:
            for follower_id in list(leader.followers):
                self._let_go(leader, follower_id, leader.committed)

    def take_ready(self) -> Iterator[AttemptId]:
        """Those that go on, in the order in which they came to wait, also those that become ready meanwhile."""
        while self._ready:
            attempt_id = self._ready.pop(0)
            if attempt_id in self._held:
                yield attempt_id

    def clear(self) -> None:
        """The store is lost, and every attempt with it."""
        self._leaders.clear()
        self._leader_of.clear()
        self._held.clear()
        self._ready.clear()

    def validate(self) -> None:
        """Asserts the invariants."""
        following = {name: leader for leader in self._leaders.values() for name in leader.followers}
        assert following == self._leader_of, "a follower and its leader do not know each other"
        assert all(awaited > leader.committed for leader in self._leaders.values() for _, awaited in leader.followers.values())
        assert not self._leaders.keys() & self._leader_of.keys() and not self._held.keys() & {*self._leaders, *self._leader_of}
        assert not self._ready, "who is ready has not gone on"

    def _let_go(self, leader: _Leader, follower_id: AttemptId, held: int) -> None:
        del leader.followers[follower_id], self._leader_of[follower_id]
        self._held[follower_id] = held
        self._ready.append(follower_id)


def _num_common(one: Sequence[BlockKey], other: Sequence[BlockKey]) -> int:
    """With how many of the same blocks both begin: a key stands for all that comes before it."""
    most = min(len(one), len(other))
    return bisect_left(range(most), True, key=lambda place: one[place] != other[place])
