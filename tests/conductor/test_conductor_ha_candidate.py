"""Who leads, decided: a Conductor between its clock and what Valkey says, both turned by hand."""

from __future__ import annotations

import random

import pytest

from conductor.server.leadership import Candidate
from springtide.clock import ManualClock
from springtide.leader_lease import Answer, Claim, Free, Granted, Held, Leader

LEASE_S = 3.0
OTHER = Leader("conductor-1", "10.0.0.1:1", 1)


class Story:
    """A candidate with its clock; each answer takes `answer_s` to come."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.candidate = Candidate(LEASE_S)

    def ask(self, answer: Answer | None, eligible: bool = True, answer_s: float = 0.0) -> Claim:
        """The next claim, made when it is due and answered so."""
        self.clock.advance(max(0.0, self.candidate.due_at - self.clock.now()))
        asked_at = self.clock.now()
        claim = self.candidate.claim(asked_at, eligible)
        assert claim is not None
        self.clock.advance(answer_s)
        self.candidate.answered(answer, asked_at, self.clock.now())
        return claim

    @property
    def leads(self) -> bool:
        return self.candidate.leads(self.clock.now())


def test_a_free_lease_is_taken_and_renewed_well_before_it_ends() -> None:
    story = Story()
    assert not story.leads
    assert story.ask(Granted(1)).take
    assert story.leads and story.candidate.epoch == 1
    began = story.clock.now()
    assert story.ask(Granted(1)).take
    assert story.clock.now() - began == pytest.approx(LEASE_S / 3)
    assert story.leads


def test_a_leader_that_cannot_renew_stops_before_its_lease_is_over() -> None:
    story = Story()
    story.ask(Granted(1), answer_s=0.4)
    granted_at = story.clock.now() - 0.4
    while story.clock.now() < granted_at + LEASE_S - 0.5:
        assert story.leads
        story.ask(None)
    story.clock.advance(granted_at + LEASE_S - 0.001 - story.clock.now())
    assert not story.leads


def test_the_lease_counts_from_before_it_was_asked_for_however_late_the_answer() -> None:
    story = Story()
    story.ask(Granted(1), answer_s=LEASE_S)
    assert not story.leads


def test_a_standby_asks_at_the_moment_at_which_the_leaders_lease_ends() -> None:
    story = Story()
    story.ask(Held(OTHER, left_s=0.6))
    until = story.clock.now() + 0.6
    assert story.candidate.leader == OTHER
    while story.candidate.due_at < until:
        story.ask(Held(OTHER, left_s=until - story.candidate.due_at))
    assert story.candidate.due_at - until < 0.01
    assert story.ask(Granted(2)) == Claim(floor=1, take=True, leads=False)
    assert story.leads and story.candidate.leader is None


def test_a_standby_looks_often_enough_to_succeed_soon_whoever_resigns() -> None:
    story = Story()
    story.ask(Held(OTHER, left_s=LEASE_S))
    assert story.candidate.due_at - story.clock.now() <= 0.25


def test_a_lease_that_is_kept_vacant_is_waited_for_as_another_ones() -> None:
    story = Story()
    story.ask(Held(None, left_s=0.1))
    assert not story.leads and story.candidate.leader is None
    assert story.candidate.due_at - story.clock.now() == pytest.approx(0.1, abs=0.01)


def test_a_leader_says_so_when_it_renews_and_is_above_its_own_epoch_when_valkey_forgot_it() -> None:
    story = Story()
    story.ask(Granted(7))
    assert story.ask(Granted(8)) == Claim(floor=7, take=True, leads=True)
    assert story.leads and story.candidate.epoch == 8


def test_a_deposed_leader_stops_and_knows_its_successor() -> None:
    story = Story()
    story.ask(Granted(1))
    story.ask(Held(Leader("conductor-1", "10.0.0.1:1", 2), left_s=LEASE_S))
    assert not story.leads
    assert (story.candidate.epoch, story.candidate.leader) == (2, Leader("conductor-1", "10.0.0.1:1", 2))


def test_a_higher_epoch_from_a_gateway_silences_a_leader_until_valkey_confirms_it() -> None:
    story = Story()
    story.ask(Granted(1))
    story.candidate.heard(5, story.clock.now())
    assert not story.leads
    assert story.candidate.due_at == story.clock.now(), "Valkey is asked at once"
    assert story.ask(Granted(6)) == Claim(floor=5, take=True, leads=False)
    assert story.leads and story.candidate.epoch == 6
    story.candidate.heard(6, story.clock.now())
    assert story.leads


def test_a_grant_that_a_gateway_has_overtaken_is_none() -> None:
    story = Story()
    asked_at = story.clock.now()
    assert story.candidate.claim(asked_at, eligible=True) == Claim(floor=1, take=True, leads=False)
    story.candidate.heard(4, story.clock.now())
    story.candidate.answered(Granted(1), asked_at, story.clock.now())
    assert not story.leads
    assert story.ask(Granted(5)).floor == 4
    assert story.leads


def test_who_has_just_started_looks_and_does_not_take_but_a_leader_keeps_what_it_has() -> None:
    story = Story()
    assert not story.ask(Free(), eligible=False).take
    assert story.ask(Granted(1)).take
    assert story.ask(Granted(1), eligible=False).take


def test_who_resigned_does_not_lead_whatever_its_lease_says() -> None:
    story = Story()
    story.ask(Granted(1))
    story.candidate.resign()
    assert not story.leads


class Valkey:
    """The lease as the script keeps it, on a clock of its own; it may forget everything."""

    def __init__(self) -> None:
        self.holder: str | None = None
        """Empty while it is vacant."""
        self.until = 0.0
        self.epoch = self.last_epoch = 0

    def claim(self, name: str, claim: Claim, now: float) -> Answer:
        if now >= self.until:
            self.holder = None
        if self.holder is None and self.last_epoch < claim.floor and not claim.leads:
            self.holder, self.until, self.last_epoch = "", now + LEASE_S, claim.floor
        if self.holder == "" and not claim.leads:
            return Held(None, self.until - now)
        if self.holder and self.holder != name:
            return Held(Leader(self.holder, self.holder, self.epoch), self.until - now)
        if self.holder is None and not claim.take:
            return Free()
        if self.holder != name or self.epoch < claim.floor:
            self.epoch = max(self.last_epoch, claim.floor) + 1
        self.holder, self.until, self.last_epoch = name, now + LEASE_S, self.epoch
        return Granted(self.epoch)


@pytest.mark.parametrize("seed", range(20))
def test_there_is_never_more_than_one_leader_and_epochs_only_grow(seed: int) -> None:
    """Stops, slow and lost answers at random, and a Valkey that forgets everything now and then."""
    chance = random.Random(seed)
    print(f"seed {seed}")
    valkey, clock = Valkey(), ManualClock(100.0)
    candidates = {name: Candidate(LEASE_S) for name in "abc"}
    stopped_until = dict.fromkeys(candidates, 0.0)
    in_flight: list[tuple[float, str, Answer | None, float]] = []
    epochs = [0]
    for _ in range(4000):
        clock.advance(chance.uniform(0.0, 0.05))
        now = clock.now()
        if chance.random() < 0.002:
            valkey = Valkey()
        for name, candidate in candidates.items():
            if chance.random() < 0.002:
                stopped_until[name] = now + chance.uniform(0.0, 3 * LEASE_S)
            waiting = any(entry[1] == name for entry in in_flight)
            if now < stopped_until[name] or waiting or (claim := candidate.claim(now, eligible=True)) is None:
                continue
            answer = valkey.claim(name, claim, now) if chance.random() > 0.05 else None
            answer = answer if chance.random() > 0.05 else None  # it was granted, and nobody learns of it
            in_flight.append((now + chance.uniform(0.0, 0.3), name, answer, now))
        for entry in [entry for entry in in_flight if entry[0] <= now and stopped_until[entry[1]] <= now]:
            in_flight.remove(entry)
            _, name, answer, asked_at = entry
            candidates[name].answered(answer, asked_at, now)
        leaders = [candidate for candidate in candidates.values() if candidate.leads(now)]
        assert len(leaders) <= 1
        for leader in leaders:
            leader.heard(epochs[-1], now)  # a gateway asks, and says what it has seen
            if leader.leads(now) and leader.epoch != epochs[-1]:
                epochs.append(leader.epoch)
    assert len(epochs) > 4 and epochs == sorted(epochs), epochs
