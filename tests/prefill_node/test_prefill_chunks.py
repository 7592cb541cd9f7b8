"""How large the chunks of a pass are, and what that means for who waits: the policy alone, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from prefill_node.core.attempt import PrefillAttempt
from prefill_node.core.scheduling import ChunkPolicy
from springtide.chunking import LEAST_PART, ROUND_TO, Chunking
from springtide.cost import PrefillCost
from springtide.protocol.starts import PrefillStart
from tests.support.node_core import make_request

CHUNK = 512
COST = PrefillCost(fixed_ms=5.0, per_token_ms=0.3, per_pair_ms=2e-5)
"""Of a small model on two cores: at 50,000 tokens a token's attention costs more than three times all the rest."""
POLICY = ChunkPolicy(Chunking(COST, CHUNK))
FIXED_SIZES = ChunkPolicy(Chunking(COST, CHUNK, chunk_ms=1e9))


def accepted(
    policy: ChunkPolicy, name: str, num_tokens: int, *, arrived_at: float = 0.0, computed: int = 0, budget_ms: float = 0.0
) -> PrefillAttempt:
    attempt = PrefillAttempt(
        0, PrefillStart(make_request(name, num_tokens), "decode:1", "decode-0", budget_ms), arrived_at, phase="running"
    )
    attempt.computed = attempt.launched = computed
    attempt.work_ms = policy.work_ms(num_tokens, computed)
    attempt.due_at = policy.due_at(attempt)
    return attempt


def sizes(policy: ChunkPolicy, *attempts: PrefillAttempt, now: float = 0.0) -> list[tuple[str, int]]:
    return [(attempt.attempt_id, num_tokens) for attempt, num_tokens in policy.choose(attempts, now)]


def pass_ms(policy: ChunkPolicy, chosen: list[tuple[PrefillAttempt, int]]) -> float:
    cost = policy.chunking.cost
    return cost.fixed_ms + sum(cost.predict_ms(num_tokens, attempt.computed) - cost.fixed_ms for attempt, num_tokens in chosen)


@dataclass
class Engine:
    """Passes of a policy that take what its cost model says."""

    policy: ChunkPolicy
    arrivals: list[PrefillAttempt]
    """By the time."""
    now: float = 0.0
    pass_times_ms: list[float] = field(default_factory=list)
    finished_at: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        here: list[PrefillAttempt] = []
        while here or self.arrivals:
            while self.arrivals and self.arrivals[0].arrived_at <= self.now:
                here.append(self.arrivals.pop(0))
            chosen = list(self.policy.choose(here, self.now))
            if not chosen:
                self.now = self.arrivals[0].arrived_at
                continue
            assert sum(num_tokens for _, num_tokens in chosen) <= self.policy.chunking.chunk_tokens
            self.pass_times_ms.append(pass_ms(self.policy, chosen))
            self.now += self.pass_times_ms[-1] / 1000
            for attempt, num_tokens in chosen:
                attempt.computed = attempt.launched = attempt.launched + num_tokens
                if not attempt.remaining_tokens:
                    self.finished_at[attempt.attempt_id] = self.now
                    here.remove(attempt)


def test_the_chunks_of_a_long_prompt_take_as_long_as_its_first_one() -> None:
    engine = Engine(POLICY, [accepted(POLICY, "long", 30_000)])
    engine.run()
    assert max(engine.pass_times_ms) == pytest.approx(COST.predict_ms(CHUNK))
    assert min(engine.pass_times_ms[:-1]) > 0.8 * COST.predict_ms(CHUNK)


def test_chunks_shrink_with_what_is_before_them_to_even_sizes_and_not_below_an_eighth() -> None:
    chunks = [sizes(POLICY, accepted(POLICY, "long", 2_000_000, computed=computed))[0][1] for computed in (0, 5_000, 20_000, 1_000_000)]
    assert chunks[0] == CHUNK and chunks == sorted(chunks, reverse=True) and chunks[-1] == CHUNK // LEAST_PART
    assert all(chunk % ROUND_TO == 0 for chunk in chunks)


def test_chunks_do_not_shrink_where_small_ones_would_cost_more_than_a_twentieth() -> None:
    dear = ChunkPolicy(Chunking(PrefillCost(20.0, 0.1, 2e-6), CHUNK))
    ((_, chunk),) = sizes(dear, accepted(dear, "long", 200_000, computed=150_000))
    assert chunk == CHUNK and dear.chunking.cost.predict_ms(CHUNK, 150_000) > 2 * dear.chunking.cost.predict_ms(CHUNK)
    ((_, chunk),) = sizes(dear, accepted(dear, "very long", 2_000_000, computed=1_000_000))
    assert chunk < CHUNK and dear.chunking.cost.predict_ms(chunk, 1_000_000) == pytest.approx(20 * dear.chunking.cost.fixed_ms, rel=0.05)


def test_the_longest_pass_can_be_configured() -> None:
    policy = ChunkPolicy(Chunking(COST, CHUNK, chunk_ms=50.0))
    ((_, chunk),) = sizes(policy, accepted(policy, "long", 30_000))
    assert COST.predict_ms(chunk) <= 50.0 < COST.predict_ms(chunk + ROUND_TO)


def test_a_time_that_no_pass_can_keep_still_computes_something() -> None:
    policy = ChunkPolicy(Chunking(COST, CHUNK, chunk_ms=1.0))
    assert sizes(policy, accepted(policy, "long", 30_000)) == [("long", CHUNK // LEAST_PART)]


@pytest.mark.parametrize(
    "policy", [POLICY, FIXED_SIZES, ChunkPolicy(Chunking(COST, CHUNK, chunk_ms=50.0))], ids=["default", "fixed", "50 ms"]
)
@pytest.mark.parametrize("num_tokens", [300, 5_000, 60_000])
def test_predicted_work_is_what_the_passes_of_a_prompt_alone_take(policy: ChunkPolicy, num_tokens: int) -> None:
    engine = Engine(policy, [accepted(policy, "alone", num_tokens)])
    engine.run()
    assert policy.work_ms(num_tokens, 0) == pytest.approx(1000 * engine.now, rel=0.02)


def test_a_short_prompt_joins_by_shrinking_the_chunk_of_a_long_one_that_is_more_urgent() -> None:
    long, short = accepted(POLICY, "long", 30_000, budget_ms=1.0), accepted(POLICY, "short", 100)
    ((first, chunk), joined) = sizes(POLICY, long, short)
    assert first == "long" and joined == ("short", 100)
    assert chunk <= CHUNK - 100


def test_shorts_have_at_most_half_of_the_pass_of_a_long_one() -> None:
    long = accepted(POLICY, "long", 30_000, budget_ms=1.0)
    chosen = sizes(POLICY, long, *(accepted(POLICY, f"short-{i}", 100) for i in range(10)))
    assert chosen[0][0] == "long" and len(chosen) == 3
    assert chosen[0][1] >= CHUNK // 2 - ROUND_TO


def test_who_would_gain_less_than_the_more_urgent_one_loses_does_not_join() -> None:
    """The tail of another prompt as long as the first one's: nothing speaks for it but its turn."""
    first = accepted(POLICY, "first", 600, budget_ms=1.0)
    tail = accepted(POLICY, "tail", 30_000)
    tail.computed = tail.launched = 30_000 - 200
    assert sizes(POLICY, first, tail) == [("first", CHUNK)]


def test_a_prompt_that_would_end_in_this_pass_is_not_cut_for_another() -> None:
    first, second = accepted(POLICY, "first", 400, budget_ms=1.0), accepted(POLICY, "second", 200)
    assert sizes(POLICY, first, second) == [("first", 400)]


def times_to_first_token_ms(policy: ChunkPolicy, arrivals_s: list[float]) -> list[float]:
    """Of 100-token prompts that arrive while a 100,000-token one is computed."""
    shorts = [accepted(policy, f"short-{i}", 100, arrived_at=arrived_at) for i, arrived_at in enumerate(arrivals_s)]
    engine = Engine(policy, [accepted(policy, "long", 100_000), *shorts])
    engine.run()
    assert max(engine.finished_at.values()) == engine.finished_at["long"]
    return [1000 * (engine.finished_at[short.attempt_id] - short.arrived_at) for short in shorts]


def test_a_short_prompt_in_the_middle_of_a_very_long_one_waits_for_a_small_multiple_of_its_own_work() -> None:
    own_ms = POLICY.work_ms(100, 0)
    whole_s = POLICY.work_ms(100_000, 0) / 1000
    arrivals_s = [whole_s * (0.05 + 0.9 * i / 40) for i in range(40)]
    waited = times_to_first_token_ms(POLICY, arrivals_s)
    assert max(waited) <= COST.predict_ms(CHUNK) + own_ms + 1e-6, "the pass under way, and its own"
    assert max(waited) < 6.5 * own_ms
    assert max(times_to_first_token_ms(ChunkPolicy(Chunking(COST, CHUNK, chunk_ms=2 * own_ms)), arrivals_s)) < 5 * own_ms
    fixed_sizes = times_to_first_token_ms(FIXED_SIZES, arrivals_s)
    assert max(fixed_sizes) > 3 * max(waited) and sum(fixed_sizes) > 2 * sum(waited)


def test_a_very_long_prompt_loses_little_by_smaller_chunks_and_by_those_it_lets_pass() -> None:
    alone, with_fixed_sizes = POLICY.work_ms(100_000, 0), FIXED_SIZES.work_ms(100_000, 0)
    assert alone < 1.03 * with_fixed_sizes
