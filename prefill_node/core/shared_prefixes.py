"""What several prompts of an engine begin with is computed by the one that came first; those that come meanwhile wait until it is in the
store, and take it from there. Pure: no I/O, no clock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence, Set
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
    """Of these, those that are in the store."""


@dataclass(slots=True)
class _Leader:
    keys: tuple[BlockKey, ...]
    idle: bool
    committed: int
    followers: dict[AttemptId, PrefillAttempt] = field(default_factory=dict)


class SharedPrefixes:
    """Who computes what, and who waits for it. An attempt leads from when it asks for slots until all its blocks are committed, or follows
    a leader, for its `shared_blocks`."""

    def __init__(self) -> None:
        self._leaders: dict[AttemptId, _Leader] = {}
        self._leader_of: dict[AttemptId, _Leader] = {}
        """By follower."""
        self._ready: dict[AttemptId, int] = {}
        """Those that go on, with the blocks that are in the store by now."""

    @property
    def leader_ids(self) -> Set[AttemptId]:
        """Who leads."""
        return self._leaders.keys()

    @property
    def follower_ids(self) -> Set[AttemptId]:
        """Who follows."""
        return self._leader_of.keys()

    def all_followers(self) -> Iterator[PrefillAttempt]:
        """Of every leader."""
        return (follower for leader in self._leaders.values() for follower in leader.followers.values())

    def longest(self, attempt: PrefillAttempt) -> Underway | None:
        """The longest beginning of its prompt that is being computed here. What is in idle capacity counts for its like alone."""
        found = None
        keys = attempt.request.keys[: attempt.request.reusable_blocks]
        for leader_id, leader in self._leaders.items():
            place = leader.committed
            if (leader.idle and not attempt.idle) or keys[place : place + 1] != leader.keys[place : place + 1]:
                continue
            blocks = _num_common(keys, leader.keys)
            if blocks > place and (found is None or blocks > found.blocks):
                found = Underway(leader_id, blocks, place)
        return found

    def lead(self, attempt: PrefillAttempt) -> None:
        """The attempt computes all of its prompt that is not in the store, as its `shared_blocks` are."""
        self._leaders[attempt.attempt_id] = _Leader(attempt.request.keys, attempt.idle, attempt.shared_blocks)

    def follow(self, attempt: PrefillAttempt, leader_id: AttemptId) -> None:
        """The attempt waits for its `shared_blocks`."""
        leader = self._leaders[leader_id]
        leader.followers[attempt.attempt_id] = attempt
        self._leader_of[attempt.attempt_id] = leader

    def followers(self, leader_id: AttemptId) -> dict[AttemptId, PrefillAttempt]:
        """Of a leader: always those of the moment."""
        return self._leaders[leader_id].followers

    def committed(self, attempt_id: AttemptId, blocks: int) -> None:
        """So many of the attempt's blocks are in the store: where it leads, who waited for no more goes on."""
        leader = self._leaders.get(attempt_id)
        if leader is None:
            return
        leader.committed = max(leader.committed, blocks)
        for follower in [one for one in leader.followers.values() if one.shared_blocks <= blocks]:
            self._let_go(leader, follower)

    def leave(self, attempt_id: AttemptId) -> None:
        """The attempt computes or awaits nothing any more. Its followers go on: they look for another leader, or lead."""
        self._ready.pop(attempt_id, None)
        followed = self._leader_of.pop(attempt_id, None)
        if followed is not None:
            del followed.followers[attempt_id]
        leader = self._leaders.pop(attempt_id, None)
        if leader is not None:
            for follower in list(leader.followers.values()):
                self._let_go(leader, follower)

    def take_ready(self) -> Iterator[tuple[AttemptId, int]]:
        """Those that go on, in the order in which they came to wait, with the blocks that are in the store; also who becomes ready
        meanwhile."""
        while self._ready:
            attempt_id = next(iter(self._ready))
            yield attempt_id, self._ready.pop(attempt_id)

    def clear(self) -> None:
        """The store is lost, and every attempt with it."""
        self._leaders.clear()
        self._leader_of.clear()
        self._ready.clear()

    def validate(self) -> None:
        """Asserts the invariants."""
        following = {name: leader for leader in self._leaders.values() for name in leader.followers}
        assert following == self._leader_of, "a follower and its leader do not know each other"
        assert all(one.shared_blocks > leader.committed for leader in self._leaders.values() for one in leader.followers.values())
        assert not self._leaders.keys() & self._leader_of.keys()
        assert not self._ready, "who is ready has not gone on"

    def _let_go(self, leader: _Leader, follower: PrefillAttempt) -> None:
        del leader.followers[follower.attempt_id], self._leader_of[follower.attempt_id]
        self._ready[follower.attempt_id] = min(leader.committed, follower.shared_blocks)


def _num_common(one: Sequence[BlockKey], other: Sequence[BlockKey]) -> int:
    """With how many of the same blocks both begin: a key stands for all that comes before it."""
    most = min(len(one), len(other))
    return bisect_left(range(most), True, key=lambda place: one[place] != other[place])
