"""What a Conductor knows that did not place an attempt itself: a standby, from what gateways tell it, foresees what the leader foresees."""

from __future__ import annotations

import numpy as np
from conductor_support import BLOCK_TOKENS, ask, keys_of, make_core, report

from conductor.core.conductor import ConductorCore
from conductor.core.types.events import Placed
from gateway.conductor_link import placed
from springtide.ids import AttemptId, GatewayId, RequestId
from springtide.protocol import wire
from springtide.protocol.attempts import AttemptReport, LiveAttempt, Phase, Progress, Renew
from springtide.protocol.instances import Role
from springtide.protocol.scheduling import Schedule

NUM_TOKENS = 101
GATEWAY = GatewayId("g")


class Pair:
    """A leader and a standby with the same instances, and a gateway that tells both, in the messages that go over the wire."""

    def __init__(self) -> None:
        self.leader, self.standby = make_core(prefills=["p0"]), make_core(prefills=["p0"])

    @property
    def cores(self) -> tuple[ConductorCore, ConductorCore]:
        return self.leader, self.standby

    def place(self, attempt: str, tenant: str, now: float, queue_ms: float = 0.0) -> LiveAttempt:
        """Returns what the standby was told."""
        for core in self.cores:
            report(core, "p0", Role.PREFILL, now=now, queue_ms=queue_ms)
        keys = keys_of(NUM_TOKENS // BLOCK_TOKENS)
        request = Schedule(AttemptId(attempt), RequestId("r"), GATEWAY, keys, NUM_TOKENS, 4000, tenant=tenant)
        reply = ask(self.leader, wire.SCHEDULE.decode(wire.SCHEDULE.encode(request)), now)
        assert reply.assignment is not None
        live = placed(request, wire.ASSIGNMENT.decode(wire.ASSIGNMENT.encode(reply.assignment)))
        self.tell(self.standby, live, now)
        return live

    def advance(self, attempt: str, phase: Phase, now: float, *, ttft_ms: float = 0.0, output_tokens: int = 0) -> None:
        progress = Progress(AttemptId(attempt), phase, ttft_ms=ttft_ms, output_tokens=output_tokens)
        for core in self.cores:
            self.tell(core, progress, now)

    @staticmethod
    def tell(core: ConductorCore, report: AttemptReport, now: float) -> None:
        heard = wire.ATTEMPT_REPORT.decode(wire.ATTEMPT_REPORT.encode(report))
        core.handle(Placed(GATEWAY, heard) if isinstance(heard, LiveAttempt) else heard, now)
        core.validate()


def test_a_standby_learns_output_lengths_by_tenant() -> None:
    pair = Pair()
    for number in range(64):
        tenant, output_tokens = ("terse", 4) if number % 2 else ("wordy", 900)
        pair.place(f"a{number}", tenant, now=float(number))
        pair.advance(f"a{number}", Phase.FINISHED, float(number), output_tokens=output_tokens)
    for tenant, expected in (("terse", 4), ("wordy", 900)):
        predicted = [core.state.lengths.predict(tenant, 4000) for core in pair.cores]
        assert predicted == [expected, expected]


def test_a_standby_learns_how_long_attempts_really_wait_and_keeps_score() -> None:
    pair = Pair()
    for number in range(100):
        pair.place(f"a{number}", "", now=float(number), queue_ms=9_000.0)
        pair.advance(f"a{number}", Phase.DECODE, number + 0.2, ttft_ms=201.0)
        pair.advance(f"a{number}", Phase.FINISHED, number + 0.5, output_tokens=4)
    own, ahead = np.array([101.0]), np.array([9_000.0])
    led, followed = (core.state.queue_bias.factors(own, ahead)[0] for core in pair.cores)
    assert led == followed < 0.1
    assert pair.leader.scores.errors.summaries() == pair.standby.scores.errors.summaries()


def test_a_standby_expects_an_attempt_in_its_batch_when_the_leader_does_and_for_as_long() -> None:
    pair = Pair()
    pair.place("a", "", now=0.0, queue_ms=9_000.0)
    for at in (1.0, 9.2, 300.0):
        led, followed = (core.state.forecast.pool(0.0, at, joining=True).attempts.sum() for core in pair.cores)
        assert led == followed
    led_attempt, followed_attempt = (core.state.attempts[AttemptId("a")] for core in pair.cores)
    assert followed_attempt.prediction == led_attempt.prediction
    assert (followed_attempt.prefill_ms, followed_attempt.most_tokens) == (led_attempt.prefill_ms, 4000)


def test_a_restarted_conductor_takes_over_predictions_from_renewals() -> None:
    pair, restarted = Pair(), make_core(prefills=["p0"])
    told = pair.place("a", "acme", now=0.0, queue_ms=9_000.0)
    restarted.handle(Renew(GATEWAY, (told,)), 0.0)
    (attempt,) = restarted.state.attempts.values()
    assert attempt.prediction == pair.leader.state.attempts[AttemptId("a")].prediction
    assert attempt.tenant == "acme"
