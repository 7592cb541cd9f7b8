"""What the Conductor knows of the cluster: instances with their load, and the attempts it placed on them.

An instance reports its own work; what was placed on it since it made the report is added from here. `LoadReport.attempt_ids` says which
attempts a report includes, so that none is counted twice or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from conductor.core.coming_prefixes import ComingPrefixes
from conductor.core.forecast.decode_forecast import DecodeForecast
from conductor.core.forecast.output_lengths import OutputLengths
from conductor.core.forecast.queue_bias import QueueBias
from conductor.core.types.events import Score
from springtide.chunking import Chunking
from springtide.cost import PrefillCost
from springtide.ids import AttemptId, BlockKey, GatewayId, InstanceId, RequestId
from springtide.protocol.attempts import Phase, Prediction
from springtide.protocol.instances import InstanceRef, Load, Role
from springtide.protocol.scheduling import Schedule


@dataclass(slots=True)
class PlacedAttempt:
    attempt_id: AttemptId
    request_id: RequestId | None
    """None when another Conductor placed it."""
    gateway_id: GatewayId
    prefill_id: InstanceId
    decode_id: InstanceId
    phase: Phase
    num_tokens: int
    num_blocks: int
    """Slots that the prompt and its predicted output need at the decode node."""
    output_tokens: int
    """Predicted length of its output."""
    prefill_ms: float
    """Predicted time of computing what is not cached."""
    joins_at: float
    """When its prefill is predicted to end (s)."""
    renewed_at: float
    tenant: str = ""
    most_tokens: float = math.inf
    """Upper bound of its output."""
    prediction: Prediction | None = None
    """By whichever Conductor placed it; None when it is not known."""
    unlisted: bool = False
    """Its gateway's last renewal did not list it."""
    idle: bool = False
    """In idle capacity: it counts for nothing where others are concerned."""
    earlier_tokens: int = 0
    """Of its output, those that earlier attempts have made. With any, what it takes to its first token says nothing of new requests."""
    first_token_at: float | None = None
    scores: list[Score] = field(default_factory=list)
    """Of what was predicted of it, as far as it has come to pass."""

    def tbt_ms(self, output_tokens: int, now: float) -> float | None:
        """In the mean, of an output that is out now; None where there is no time between two tokens, or the first was not seen."""
        if self.first_token_at is None or output_tokens < 2:
            return None
        return 1000.0 * (now - self.first_token_at) / (output_tokens - 1)


@dataclass(slots=True)
class Instance:
    """An instance as it was last seen. When it is down it is remembered for a lease, for a broken stream may come back."""

    ref: InstanceRef
    incarnation: int
    up: bool = True
    hung: bool = False
    """While it is down: it may still have work, and does not get on with it."""
    leaving: bool = False
    """While it is down: it ends what it has, as far as it has time."""
    load: Load = field(default_factory=Load)
    changed_at: float = 0.0
    """When `load` arrived or, while it is down, since when it is."""
    most_slots: int = 0
    """That it said it has, when it last had any: it has none while its store is away, nor has one that has just begun."""
    unreported: dict[AttemptId, PlacedAttempt] = field(default_factory=dict)
    """Placed here, and in no report yet."""
    arriving: dict[AttemptId, PlacedAttempt] = field(default_factory=dict)
    """Decode only: placed here and not yet in the batch of which the latest report tells."""

    idle: dict[AttemptId, PlacedAttempt] = field(default_factory=dict)
    """Placed here in idle capacity, and in no report yet. They are in none of the others."""

    def queue_ms(self, now: float) -> float:
        """EstimatePrefillQueueTime of Algorithm 1: what the report still leaves to do by now, and what was placed since."""
        left = self.load.queue_ms - 1000.0 * (now - self.changed_at)
        queue = left if left > 0 else 0.0
        if self.unreported:
            queue += sum(attempt.prefill_ms for attempt in self.unreported.values())
        return queue

    def inlining_ms(self) -> float:
        """Decode only: predicted time of the prompts that it is to compute itself, one after another."""
        inlined = (attempt for attempt in self.arriving.values() if attempt.prefill_id == attempt.decode_id)
        return sum(attempt.prefill_ms for attempt in inlined if attempt.phase is Phase.PREFILL)

    def slots_free(self) -> int:
        """Slots at the instance's store, less those that attempts there, and those placed since the report, will take; negative when more
        is promised than there is. Those in idle capacity would give back theirs."""
        free = self.load.slots_available + self.load.idle.slots_held - self.load.slots_promised
        if self.unreported:
            free -= sum(attempt.num_blocks for attempt in self.unreported.values())
        return free

    def report(self, load: Load, now: float) -> None:
        self.load, self.changed_at = load, now
        self.most_slots = load.slots_total or self.most_slots
        if self.unreported:
            for attempt_id in load.attempt_ids & self.unreported.keys():
                del self.unreported[attempt_id]
        if self.idle:
            for attempt_id in load.attempt_ids & self.idle.keys():
                del self.idle[attempt_id]
        if self.arriving:
            for attempt in [attempt for attempt in self.arriving.values() if attempt.phase is not Phase.PREFILL]:
                del self.arriving[attempt.attempt_id]


class ClusterState:
    """Instances and live attempts."""

    def __init__(self, block_tokens: int, chunk_tokens: int, chunk_ms: float | None = None) -> None:
        """`chunk_tokens` and `chunk_ms` are those of Chunking."""
        self.instances: dict[InstanceId, Instance] = {}
        self.attempts: dict[AttemptId, PlacedAttempt] = {}
        self.in_prefill: dict[AttemptId, PlacedAttempt] = {}
        """Of the attempts, those that wait for their first token, without those in idle capacity."""
        self.coming = ComingPrefixes(block_tokens)
        """What these will have computed where they were placed, as far as this Conductor placed them."""
        self.lengths = OutputLengths()
        self.forecast = DecodeForecast(self.lengths)
        self.queue_bias = QueueBias()
        self.touched: set[InstanceId] = set()
        """Instances that are no longer as `InstanceColumns` last saw them."""
        self._tokens_to_come = self._with_output = 0
        """Predicted lengths of the live attempts' outputs, together, and how many attempts these are: without those in idle capacity."""
        self._of_gateway: dict[GatewayId, dict[AttemptId, PlacedAttempt]] = {}
        self._renewed: dict[GatewayId, float] = {}
        """When each gateway last told of its attempts."""
        self._over: dict[AttemptId, float] = {}
        """When they ended, the earliest first: of tens of thousands, only those are looked at each second that are to be forgotten."""
        self._chunk_tokens, self._chunk_ms = chunk_tokens, chunk_ms

    def output_tokens(self, request: Schedule) -> float:
        """Predicted length of its output that is still to come."""
        most_tokens = request.max_new_tokens or math.inf
        return max(self.lengths.predict(request.tenant, most_tokens, request.output_tokens), request.min_new_tokens)

    @property
    def mean_output_tokens(self) -> float:
        """Predicted mean length of the outputs that are under way; without any, that of the recent ones."""
        return self._tokens_to_come / self._with_output if self._with_output else self.lengths.mean_tokens

    def prefill_ms(self, cost: PrefillCost, new_tokens: int, cached_tokens: int) -> float:
        """EstimatePrefillExecutionTime of Algorithm 1, every chunk paying the fixed part of the cost."""
        return Chunking(cost, self._chunk_tokens, self._chunk_ms).prompt_ms(new_tokens, cached_tokens)

    # ---- instances ----

    def instance_up(self, ref: InstanceRef, incarnation: int, now: float) -> None:
        """A stream that came back finds its instance as it was left. Another incarnation starts with no work; one never seen takes up the
        attempts that gateways said are there (this Conductor has restarted)."""
        self.touched.add(ref.instance_id)
        known = self.instances.get(ref.instance_id)
        if known is not None and known.incarnation == incarnation:
            known.ref, known.up, known.hung, known.leaving, known.changed_at = ref, True, False, False, now
            self._forecast_load(known, now)
            return
        self.forecast.down(ref.instance_id)
        instance = self.instances[ref.instance_id] = Instance(ref, incarnation, changed_at=now)
        instance.most_slots = known.most_slots if known is not None else 0
        if known is None:
            for attempt in self.attempts.values():
                self._count_work(instance, attempt)

    def instance_down(self, instance_id: InstanceId, incarnation: int, hung: bool, leaving: bool, now: float) -> None:
        instance = self.instances.get(instance_id)
        if instance is not None and instance.incarnation == incarnation and instance.up:
            instance.up, instance.hung, instance.leaving, instance.changed_at = False, hung, leaving, now
            self.forecast.down(instance_id)
            self.touched.add(instance_id)

    def report(self, instance_id: InstanceId, incarnation: int, load: Load, now: float) -> None:
        instance = self.instances.get(instance_id)
        if instance is not None and instance.incarnation == incarnation and instance.up:
            instance.report(load, now)
            self.touched.add(instance_id)
            self._forecast_load(instance, now)

    def _forecast_load(self, instance: Instance, now: float) -> None:
        load = instance.load
        if load.decode_cost is not None and load.slots_total > 0:
            self.forecast.report(instance.ref.instance_id, load.decode_cost, load.max_batch, load.running, load.tokens, load.step_ms, now)
        else:
            self.forecast.down(instance.ref.instance_id)

    # ---- attempts ----

    def place(self, attempt: PlacedAttempt, keys: Sequence[BlockKey] = ()) -> None:
        """The attempt is live, and its work counts where it was placed. `keys`: of the blocks of its prompt, as far as they are known."""
        self.remove(attempt.attempt_id)
        self._over.pop(attempt.attempt_id, None)
        self.attempts[attempt.attempt_id] = attempt
        self._of_gateway.setdefault(attempt.gateway_id, {})[attempt.attempt_id] = attempt
        if not attempt.idle:
            self._foresee(attempt)
            if attempt.phase is Phase.PREFILL:
                begins = attempt.joins_at - attempt.prefill_ms / 1000.0
                self.coming.begin(attempt.attempt_id, attempt.prefill_id, keys, begins, attempt.joins_at)
        for instance_id in (attempt.prefill_id, attempt.decode_id):
            instance = self.instances.get(instance_id)
            if instance is not None:
                self._count_work(instance, attempt)

    def _foresee(self, attempt: PlacedAttempt) -> None:
        """It counts in what is predicted of others."""
        self._tokens_to_come += attempt.output_tokens
        self._with_output += 1
        law = self.lengths.law(attempt.tenant)
        self.forecast.place(attempt.attempt_id, attempt.decode_id, attempt.num_tokens, attempt.most_tokens, law, attempt.joins_at)
        if attempt.phase is Phase.DECODE:
            self.forecast.join(attempt.attempt_id, attempt.renewed_at, attempt.earlier_tokens)
        else:
            self.in_prefill[attempt.attempt_id] = attempt

    def of_gateway(self, gateway_id: GatewayId) -> Collection[PlacedAttempt]:
        """The live attempts of a gateway."""
        return self._of_gateway.get(gateway_id, {}).values()

    def renewed(self, gateway_id: GatewayId, now: float) -> None:
        """The gateway has told of all its attempts: those that it does not list are known for it."""
        self._renewed[gateway_id] = now

    def is_over(self, attempt_id: AttemptId) -> bool:
        """Whether the attempt ended within the last lease."""
        return attempt_id in self._over

    def prefill_over(self, attempt: PlacedAttempt, now: float) -> None:
        """The first token is out. The decode node's next report tells of a batch with the attempt in it."""
        attempt.phase, attempt.first_token_at = Phase.DECODE, now
        self.in_prefill.pop(attempt.attempt_id, None)
        self.coming.end(attempt.attempt_id)
        self.forecast.join(attempt.attempt_id, now, attempt.earlier_tokens)
        prefill = self.instances.get(attempt.prefill_id)
        if prefill is not None:
            self.touched.add(attempt.prefill_id)
            if prefill.ref.role is Role.PREFILL:
                prefill.unreported.pop(attempt.attempt_id, None)
                prefill.idle.pop(attempt.attempt_id, None)

    def finish(self, attempt_id: AttemptId, output_tokens: int, now: float) -> None:
        """The attempt is over; a late message about it will not bring it back."""
        attempt = self.attempts.get(attempt_id)
        if attempt is not None and output_tokens > 0 and not attempt.idle:
            self.lengths.record(attempt.tenant, attempt.earlier_tokens + output_tokens)
        self.remove(attempt_id)
        self._over.pop(attempt_id, None)
        self._over[attempt_id] = now

    def remove(self, attempt_id: AttemptId) -> None:
        attempt = self.attempts.pop(attempt_id, None)
        if attempt is None:
            return
        self.in_prefill.pop(attempt_id, None)
        self.coming.end(attempt_id)
        if not attempt.idle:
            self._tokens_to_come -= attempt.output_tokens
            self._with_output -= 1
            self.forecast.remove(attempt_id)
        others = self._of_gateway[attempt.gateway_id]
        del others[attempt_id]
        if not others:
            del self._of_gateway[attempt.gateway_id]
        for instance in (self.instances.get(attempt.prefill_id), self.instances.get(attempt.decode_id)):
            if instance is not None:
                instance.unreported.pop(attempt_id, None)
                instance.arriving.pop(attempt_id, None)
                instance.idle.pop(attempt_id, None)
                self.touched.add(instance.ref.instance_id)

    def expire(self, now: float, lease_s: float) -> list[AttemptId]:
        """Forgets whatever was silent for a lease: attempts (returned), instances that stayed down, and that an attempt was over."""
        # Of tens of thousands, only those of gateways are looked at that were silent themselves.
        self._renewed = {gateway_id: at for gateway_id, at in self._renewed.items() if now - at <= lease_s}
        doubtful = (attempts for gateway_id, attempts in self._of_gateway.items() if gateway_id not in self._renewed)
        silent = [attempt.attempt_id for attempts in doubtful for attempt in attempts.values() if now - attempt.renewed_at > lease_s]
        for attempt_id in silent:
            self.remove(attempt_id)
        gone = [
            key
            for key, one in self.instances.items()
            if not one.up and now - one.changed_at > lease_s and not (one.leaving and self._is_at_work(one))
        ]
        for instance_id in gone:
            del self.instances[instance_id]
            self.forecast.forget(instance_id)
        self.forecast.keep_only(self.instances)
        self.touched.update(gone)
        for attempt_id in [attempt_id for attempt_id, _ in takewhile(lambda ended: now - ended[1] > lease_s, self._over.items())]:
            del self._over[attempt_id]
        return silent

    def _is_at_work(self, instance: Instance) -> bool:
        """Whether attempts live that it had when it was heard last, or has got since."""
        return bool(instance.unreported) or any(attempt_id in self.attempts for attempt_id in instance.load.attempt_ids)

    def in_order(self) -> list[Instance]:
        """All instances, as people are shown them."""
        return sorted(self.instances.values(), key=lambda instance: (instance.ref.role.value, instance.ref.instance_id))

    def of_role(self, role: Role) -> Iterable[Instance]:
        return (instance for instance in self.instances.values() if instance.ref.role is role)

    def _count_work(self, instance: Instance, attempt: PlacedAttempt) -> None:
        """Adds to `instance` what the attempt, if it was placed there, means beyond the instance's own report."""
        self.touched.add(instance.ref.instance_id)
        in_prefill = attempt.phase is Phase.PREFILL
        reported = attempt.attempt_id in instance.load.attempt_ids
        if attempt.idle:
            there = attempt.prefill_id if instance.ref.role is Role.PREFILL else attempt.decode_id
            if there == instance.ref.instance_id and not reported and (in_prefill or instance.ref.role is Role.DECODE):
                instance.idle[attempt.attempt_id] = attempt
            return
        if instance.ref.role is Role.PREFILL:
            if attempt.prefill_id == instance.ref.instance_id and in_prefill and not reported:
                instance.unreported[attempt.attempt_id] = attempt
        elif attempt.decode_id == instance.ref.instance_id:
            if not reported:
                instance.unreported[attempt.attempt_id] = attempt
            if in_prefill or not reported:
                instance.arriving[attempt.attempt_id] = attempt

    def validate(self) -> None:
        """Asserts that no work is counted for an attempt that is over, elsewhere, or not what it was placed for."""
        assert not self.attempts.keys() & self._over.keys(), "an attempt is live and over"
        foreseen = {attempt_id: attempt for attempt_id, attempt in self.attempts.items() if not attempt.idle}
        assert self._tokens_to_come == sum(attempt.output_tokens for attempt in foreseen.values())
        assert self._with_output == len(foreseen)
        self.forecast.validate(foreseen.keys())
        for instance_id, instance in self.instances.items():
            for attempt_id, attempt in [*instance.unreported.items(), *instance.arriving.items(), *instance.idle.items()]:
                assert attempt.idle == (attempt_id in instance.idle), f"{attempt_id} counts as what it is not at {instance_id}"
                assert self.attempts.get(attempt_id) is attempt, f"{instance_id} counts {attempt_id}, which is not live"
                place = attempt.prefill_id if instance.ref.role is Role.PREFILL else attempt.decode_id
                assert place == instance_id, f"{attempt_id} is counted at {instance_id}, not {place}"
            if instance.ref.role is Role.PREFILL:
                assert not instance.arriving, f"{instance_id} is no decode node"
                assert all(attempt.phase is Phase.PREFILL for attempt in instance.unreported.values()), "a finished prefill is queued"
        waiting = {key for key, attempt in foreseen.items() if attempt.phase is Phase.PREFILL}
        assert waiting == self.in_prefill.keys(), "those in prefill are not those that wait for their first token"
        assert self.coming.attempt_ids <= self.in_prefill.keys(), "blocks are to come of an attempt that computes none"
        self.coming.validate()
        by_gateway = [attempt_id for attempts in self._of_gateway.values() for attempt_id in attempts]
        assert sorted(by_gateway) == sorted(self.attempts), "the gateways' attempts are not those that live"
        for attempt in self.attempts.values():
            assert not attempt.phase.over, f"{attempt.attempt_id} is over and live"
