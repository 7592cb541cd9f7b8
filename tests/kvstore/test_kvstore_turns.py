"""Whose turn it is on the way to a store: played on a link of a rate that is not told."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.turns import BATCH_TARGET_S, FIRST_BATCH_BYTES, MAX_BATCH_BYTES, MIN_BATCH_BYTES, SMALL_BYTES, Transfer, Turn, Turns

MIB = 1 << 20


def pieces(num_bytes: int) -> list[int]:
    """As small as batches are cut."""
    whole, rest = divmod(num_bytes, MIN_BATCH_BYTES)
    return [MIN_BATCH_BYTES] * whole + [rest] * (rest > 0)


class Played:
    """A link that moves so many bytes a second, and hand-overs that are written to it batch by batch."""

    def __init__(self, bytes_per_s: float) -> None:
        self.turns = Turns()
        self.now_s = 0.0
        self._bytes_per_s = bytes_per_s
        self._under_way: list[Turn] = []
        self._wanted: dict[Transfer, int] = {}
        self._waiting: set[Transfer] = set()
        self.ended_s: dict[Transfer, float] = {}

    def begin(self, num_bytes: int) -> Transfer:
        transfer = Transfer(self.now_s, num_bytes)
        self._wanted[transfer] = num_bytes
        self._ask(transfer)
        return transfer

    def most_in_flight(self) -> int:
        return sum(turn.num_bytes for turn in self._under_way)

    def step(self) -> None:
        """The oldest batch of those on the way arrives."""
        while (turn := self.turns.next(self.now_s)) is not None:
            self._under_way.append(turn)
        turn = self._under_way.pop(0)
        self.now_s += turn.num_bytes / self._bytes_per_s
        turn.moved = turn.num_bytes
        self.turns.end(turn, self.now_s)
        self._wanted[turn.transfer] -= turn.num_bytes
        if self._wanted[turn.transfer]:
            self._ask(turn.transfer)
        else:
            self.ended_s[turn.transfer] = self.now_s

    def until(self, *transfers: Transfer) -> None:
        for _ in range(100_000):
            if all(transfer in self.ended_s for transfer in transfers):
                return
            self.step()
        raise AssertionError("they do not end")

    def _ask(self, transfer: Transfer) -> None:
        self.turns.ask(transfer, pieces(self._wanted[transfer]))


def test_a_short_hand_over_passes_long_ones() -> None:
    link = Played(bytes_per_s=MIB / 2)
    long = [link.begin(4 * MIB) for _ in range(20)]
    link.step()
    short = link.begin(16 << 10)
    link.until(short)
    assert link.ended_s[short] - short.began_s < 2.0
    assert not link.ended_s.keys() & set(long)


def test_of_hand_overs_of_one_size_each_is_finished_before_the_next_begins() -> None:
    link = Played(bytes_per_s=MIB / 2)
    link.until(link.begin(MIB))
    started = [link.begin(4 * MIB) for _ in range(5)]
    link.until(*started)
    ended = sorted(link.ended_s[transfer] for transfer in started)
    assert all(later - earlier == pytest.approx(8.0, abs=2.0) for earlier, later in itertools.pairwise(ended))


def test_a_long_hand_over_is_not_passed_for_ever() -> None:
    """Short ones keep the link busy by themselves: a new one comes whenever one has ended."""
    link = Played(bytes_per_s=MIB)
    link.until(link.begin(MIB))
    long = link.begin(8 * MIB)
    for _ in range(1_000):
        if long in link.ended_s:
            break
        link.until(link.begin(MIB // 4))
    assert link.ended_s[long] - long.began_s < 2.5 * 8, "it takes 8 s alone, and is not passed by what comes after that"


def test_many_small_hand_overs_at_once_do_not_pass_a_long_one_for_ever_either() -> None:
    """Each followed by another when it has ended, so that as much of them as goes beside others always does."""
    link = Played(bytes_per_s=MIB // 8)
    link.until(link.begin(MIB // 4))
    long, small = link.begin(MIB), [link.begin(SMALL_BYTES) for _ in range(6)]
    for _ in range(1_000):
        if long in link.ended_s:
            break
        link.step()
        small = [link.begin(SMALL_BYTES) if one in link.ended_s else one for one in small]
    assert long in link.ended_s and link.ended_s[long] - long.began_s < 10 * 8, "it takes 8 s alone"


@given(rates=st.lists(st.floats(1e4, 1e10), min_size=1, max_size=5), sizes=st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=20))
def test_what_is_on_the_way_is_bounded_and_nothing_is_forgotten(rates: list[float], sizes: list[int]) -> None:
    link = Played(rates[0])
    transfers = [link.begin(size) for size in sizes]
    for rate in itertools.cycle(rates):
        link._bytes_per_s = rate
        if all(transfer in link.ended_s for transfer in transfers):
            break
        link.step()
        assert link.most_in_flight() < 2 * MAX_BATCH_BYTES
        assert MIN_BATCH_BYTES <= link.turns.batch_bytes(link.now_s) <= MAX_BATCH_BYTES
    assert all(transfer.remaining_bytes == 0 for transfer in transfers)


def test_on_a_wide_link_nobody_waits() -> None:
    turns, started = Turns(), []
    first = turns.ask(Transfer(0.0, FIRST_BATCH_BYTES), pieces(FIRST_BATCH_BYTES))
    assert turns.next(0.0) is first
    first.moved = FIRST_BATCH_BYTES
    turns.end(first, 0.001)
    for _ in range(50):
        turns.ask(Transfer(0.0, MIB // 2), pieces(MIB // 2))
    while (turn := turns.next(0.5)) is not None:
        started.append(turn)
    assert len(started) == 50


def test_a_way_that_has_become_slow_is_not_filled_with_what_it_took_before() -> None:
    """And what is on it then does not keep short ones waiting."""
    turns = Turns()
    first = turns.ask(Transfer(0.0, FIRST_BATCH_BYTES), pieces(FIRST_BATCH_BYTES))
    assert turns.next(0.0) is first
    first.moved = FIRST_BATCH_BYTES
    turns.end(first, 0.001)
    assert turns.batch_bytes(0.5) == MAX_BATCH_BYTES
    asked = [turns.ask(Transfer(0.5, 40 * MIB), pieces(40 * MIB)) for _ in range(10)]
    let_in = [turns.next(float(second)) for second in range(10, 20)]
    assert let_in == [asked[0], *[None] * 9]
    assert asked[0].num_bytes == FIRST_BATCH_BYTES, "as much of it as goes now, not as went when it was asked for"
    num_beside = FIRST_BATCH_BYTES // SMALL_BYTES
    short = [turns.ask(Transfer(20.0, SMALL_BYTES), pieces(SMALL_BYTES)) for _ in range(num_beside + 1)]
    assert [turns.next(20.0) for _ in short] == [*short[:num_beside], None]
    short[0].moved = SMALL_BYTES
    turns.end(short[0], 20.1)
    assert turns.next(20.1) is short[num_beside] and turns.next(20.1) is None


def test_a_small_batch_that_was_quick_or_slow_by_chance_changes_little() -> None:
    turns = Turns()
    for num_bytes, took_s in ((MIB, 2.0), (16 << 10, 0.0001), (MIB, 1.0)):
        turn = turns.ask(Transfer(0.0, num_bytes), pieces(num_bytes))
        assert turns.next(0.0) is turn
        turn.moved = num_bytes
        turns.end(turn, took_s)
        assert turns.batch_bytes(took_s) <= MIB // 2


@pytest.mark.parametrize("round_trip_s", [0.0, 0.3, 1.0])
def test_a_way_that_is_long_is_not_taken_for_a_narrow_one(round_trip_s: float) -> None:
    """20 MiB a second, of which as long a time's worth goes at a time however far it is."""
    turns, now_s = Turns(), 0.0
    for _ in range(20):
        num_bytes = turns.batch_bytes(now_s)
        turn = turns.ask(Transfer(now_s, 64 * MIB), pieces(num_bytes))
        assert turns.next(now_s) is turn
        now_s += num_bytes / (20 * MIB) + round_trip_s
        turn.moved, turn.round_trips_s = num_bytes, round_trip_s
        turns.end(turn, now_s)
    assert turns.batch_bytes(now_s) == pytest.approx(20 * MIB * BATCH_TARGET_S, rel=0.01)


@given(lengths=st.lists(st.integers(1, 4 * MIB), min_size=1, max_size=20), moved=st.integers(1, 64 * MIB))
def test_as_many_pieces_go_as_there_is_room_for_and_one_at_least(lengths: list[int], moved: int) -> None:
    turns = Turns()
    first = turns.ask(Transfer(0.0, moved), [moved])
    assert turns.next(0.0) is first and (first.num_pieces, first.num_bytes) == (1, moved)
    first.moved = moved
    turns.end(first, 1.0)
    turn, room = turns.ask(Transfer(1.0, sum(lengths)), lengths), turns.batch_bytes(1.0)
    assert turns.next(1.0) is turn and turn.num_bytes == sum(lengths[: turn.num_pieces])
    assert turn.num_pieces == 1 or turn.num_bytes <= room
    assert turn.num_pieces == len(lengths) or sum(lengths[: turn.num_pieces + 1]) > room


def test_what_is_longer_than_a_batch_lets_nobody_in_beside_it() -> None:
    turns = Turns()
    asked = [turns.ask(Transfer(float(i), 8 * MIB), [8 * MIB]) for i in range(2)]
    assert [turns.next(0.0), turns.next(0.0)] == [asked[0], None]


def test_who_does_not_want_its_turn_any_more_is_in_nobodys_way() -> None:
    turns, sizes = Turns(), dict.fromkeys(("first", "gone", "last"), MAX_BATCH_BYTES)
    asked: Mapping[str, Turn] = {name: turns.ask(Transfer(float(i), size), pieces(size)) for i, (name, size) in enumerate(sizes.items())}
    assert turns.next(0.0) is asked["first"] and turns.next(0.0) is None
    turns.end(asked["gone"], 0.0)
    turns.end(asked["first"], 0.0)
    assert list(drained(turns)) == [asked["last"]]


def drained(turns: Turns) -> Iterator[Turn]:
    while (turn := turns.next(0.0)) is not None:
        yield turn
