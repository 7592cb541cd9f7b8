"""The decode node's decisions: `handle(event, now)` returns what is to be done.

Ownership of slots: from Reserved to Ingested the prefill side's store writes them, from Ingested to Release this engine does. While a step
runs on them their Release is held back until the step has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median

from decode_node.core import door
from decode_node.core import events as ev
from decode_node.core.actions import Action, Reply, RunStep
from decode_node.core.attempt import Attempt
from node_runtime import events, storage
from node_runtime.calibration import Calibration
from node_runtime.slotqueue import SlotQueue
from springtide.cost import DecodeCost
from springtide.rpc import common_pb2 as pb
from springtide.sampling import SampledToken, finish_reason, token_output

_RECENT_STEPS = 32


@dataclass(frozen=True, slots=True)
class Settings:
    """`ingest_lease_s`: how long the prefill side may take. Whoever gives up earlier says so (the gateway aborts, the store tells that
    the writer is gone); this bounds what nobody speaks for any more. `slot_wait_s`: how long a full pool is waited for."""

    cost: DecodeCost
    block_tokens: int
    max_batch: int
    eos_token_ids: Collection[int]
    ingest_lease_s: float
    slot_wait_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """`tokens`: of context in the batch. `step_ms`: median of the recent steps."""

    running: int
    waiting: int
    tokens: int
    step_ms: float
    attempt_ids: tuple[str, ...]


@dataclass(slots=True)
class _Step:
    """The step under way, and the releases of attempts that ended since."""

    run: RunStep
    releases: dict[str, storage.Release] = field(default_factory=dict)


class DecodeCore:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._calibration: Calibration[DecodeCost] = Calibration(settings.cost)
        self._attempts: dict[str, Attempt] = {}
        """Oldest first."""
        self._slot_queue = SlotQueue()
        self._num_slots: int | None = None
        self._slots_available = 0
        self._step: _Step | None = None
        self._next_step_id = 0
        self._recent_ms: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._orders: list[Action] = []
        self._replies: list[Reply] = []

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """The next step is launched before the last one's tokens are sent. Late, duplicate and unknown messages change nothing."""
        match event:
            case ev.Start():
                self._start(event, now)
            case events.Abort(attempt_id):
                if attempt_id in self._attempts:
                    self._forget(self._attempts[attempt_id])
            case events.SessionEnded(session):
                for attempt in [a for a in self._attempts.values() if a.session == session]:
                    self._forget(attempt)
            case ev.StepDone() | ev.StepFailed():
                self._step_ended(event, now)
            case events.Tick():
                self._calibration.tick(now)
                self._expire(now)
                self._retry_growth()
            case storage.StoreUp(num_slots):
                self._num_slots = self._slots_available = num_slots
            case storage.StoreLost(reason):
                self._store_lost(reason)
            case storage.StoreLoad():
                self._slots_available = event.slots_available
                if event.slots_available:
                    self._retry_growth()
            case _:
                self._notice(event, now)
        self._make_room(now)
        self._ask_for_waiting(now)
        self._launch()
        actions = [*self._orders, *self._replies]
        self._orders, self._replies = [], []
        return actions

    @property
    def cost(self) -> DecodeCost:
        """As steps lately were."""
        return self._calibration.cost

    def load(self) -> Load:
        running = tokens = 0
        for attempt in self._attempts.values():
            if attempt.phase == "running":
                running += 1
                tokens += attempt.context_tokens
        return Load(
            running=running,
            waiting=len(self._attempts) - running,
            tokens=tokens,
            step_ms=median(self._recent_ms) if self._recent_ms else 0.0,
            attempt_ids=tuple(self._attempts),
        )

    def validate(self) -> None:
        """Asserts the invariants."""
        block = self._settings.block_tokens
        for attempt in self._attempts.values():
            assert (attempt.phase == "waiting") <= (attempt.attempt_id in self._slot_queue)
            if attempt.phase in ("ingesting", "running"):
                assert attempt.attempt_id not in self._slot_queue
                assert attempt.request.num_blocks <= len(attempt.slots) <= max(attempt.most_blocks(block), attempt.request.num_blocks)
            if attempt.phase == "running":
                assert attempt.committed_blocks * block <= attempt.context_tokens - 1
                assert 1 <= len(attempt.output_ids) < attempt.request.params.max_tokens
        assert all(attempt_id in self._attempts for attempt_id in self._slot_queue)
        if self._num_slots is None:
            assert not self._attempts
        if self._step is not None:
            assert len(self._step.run.batch) <= self._settings.max_batch
            assert not any(attempt_id in self._attempts for attempt_id in self._step.releases)

    # ---- gateways ----

    def _start(self, start: ev.Start, now: float) -> None:
        request = start.request
        if request.attempt_id in self._attempts or (self._step is not None and request.attempt_id in self._step.releases):
            return
        attempt = Attempt(start.session, request, start.tbt_slo_ms, arrived_at=now)
        if self._num_slots is None:
            self._reply_failure(attempt, pb.FAILURE_CODE_PEER_LOST, "the node's store is away")
        elif request.num_blocks > self._num_slots:
            message = f"the prompt needs {request.num_blocks} blocks, the arena has {self._num_slots} slots"
            self._reply_failure(attempt, pb.FAILURE_CODE_INVALID, message)
        elif why := door.refusal(self.cost, self._attempts.values(), attempt, self._settings.max_batch):
            self._reply_failure(attempt, pb.FAILURE_CODE_OVERLOADED, why)
        else:
            self._attempts[attempt.attempt_id] = attempt
            if self._slot_queue:
                self._slot_queue.wait(attempt.attempt_id, request.num_blocks, now + self._settings.slot_wait_s)
            else:
                self._reserve(attempt)

    # ---- store ----

    def _reserve(self, attempt: Attempt) -> None:
        attempt.phase = "reserving"
        request = attempt.request
        self._orders.append(storage.Reserve(request.attempt_id, request.keys, request.num_blocks, request.tenant))

    def _notice(self, notice: storage.Notice, now: float) -> None:
        if isinstance(notice, storage.StoreLoad):
            return
        attempt = self._attempts.get(notice.attempt_id)
        if attempt is None:
            return
        match notice:
            case storage.Reserved(_, slots) if attempt.phase == "reserving":
                self._slot_queue.leave(attempt.attempt_id)
                attempt.phase, attempt.slots = "ingesting", slots
                attempt.lease_until = now + self._settings.ingest_lease_s
                self._grow_ahead(attempt)
            case storage.Ingested(_, first_token) if attempt.phase == "ingesting":
                self._ingested(attempt, first_token)
            case storage.Grown(_, slots) if attempt.growth == "asked":
                attempt.slots += slots
                attempt.growth, attempt.starved_since = "none", None
                self._grow_ahead(attempt)
            case storage.AttemptFailed(_, failure) if failure.code == pb.FAILURE_CODE_POOL_FULL and attempt.phase == "reserving":
                attempt.phase = "waiting"
                self._slots_available = min(self._slots_available, attempt.request.num_blocks - 1)
                self._slot_queue.refused(
                    attempt.attempt_id, attempt.request.num_blocks, attempt.arrived_at + self._settings.slot_wait_s, now
                )
            case storage.AttemptFailed(_, failure) if failure.code == pb.FAILURE_CODE_POOL_FULL and attempt.growth == "asked":
                attempt.growth = "refused"
            case storage.AttemptFailed(_, failure):
                self._fail(attempt, failure.code, failure.message)

    def _ingested(self, attempt: Attempt, first_token: int) -> None:
        request = attempt.request
        if finish_reason(first_token, request.first_position + 1, request.params, self._settings.eos_token_ids):
            # The prefill side has told the gateway so: nothing is left to say.
            self._forget(attempt)
            return
        attempt.begin(first_token, self._settings.block_tokens)
        self._grow_ahead(attempt)

    def _store_lost(self, reason: str) -> None:
        self._num_slots = None
        self._slots_available = 0
        self._slot_queue.clear()
        for attempt in self._attempts.values():
            self._reply_failure(attempt, pb.FAILURE_CODE_PEER_LOST, reason)
        self._attempts.clear()
        if self._step is not None:
            # There is nobody left to release to; the step's own memory stays mapped until it has ended.
            self._step.releases.clear()

    # ---- slots ----

    def _ask_for_waiting(self, now: float) -> None:
        head = self._slot_queue.next_to_ask(self._slots_available, now)
        if head is not None:
            self._reserve(self._attempts[head])

    def _grow_ahead(self, attempt: Attempt) -> None:
        """Asks for the next slot while there is still room in the last one, so that no step waits for it."""
        if attempt.growth == "none" and attempt.wants_slot(self._settings.block_tokens):
            attempt.growth = "asked"
            self._orders.append(storage.Grow(attempt.attempt_id, 1))

    def _retry_growth(self) -> None:
        for attempt in self._attempts.values():
            if attempt.growth == "refused":
                attempt.growth = "none"
                self._grow_ahead(attempt)

    def _make_room(self, now: float) -> None:
        """When a sequence sits out steps because the pool is truly full, the youngest one gives up its slots: the gateway schedules it
        again with what it has generated. The oldest is never preempted, so work always ends."""
        refused = [attempt for attempt in self._attempts.values() if attempt.growth == "refused" and attempt.phase == "running"]
        starved = next((attempt for attempt in refused if attempt.lacks_slot(self._settings.block_tokens)), None)
        if starved is None or (self._step is not None and self._step.releases):
            return
        running = [attempt for attempt in self._attempts.values() if attempt.phase == "running"]
        if len(running) > 1:
            self._fail(running[-1], pb.FAILURE_CODE_PREEMPTED, "its slots were needed by an older request")
        elif starved.starved_since is None:
            self._starve(starved, now)

    def _starve(self, attempt: Attempt, now: float) -> None:
        """It is alone: others' prompts, leases or quarantined slots hold the rest of the pool for a while, or it has outgrown the arena."""
        assert self._num_slots is not None
        needed = attempt.needed_blocks(self._settings.block_tokens)
        if needed > self._num_slots:
            self._fail(attempt, pb.FAILURE_CODE_INVALID, f"the sequence needs {needed} blocks, the arena has {self._num_slots} slots")
        else:
            attempt.starved_since = now

    def _expire(self, now: float) -> None:
        for attempt_id in self._slot_queue.expired(now):
            attempt = self._attempts[attempt_id]
            message = f"no {attempt.request.num_blocks} slots came free within {self._settings.slot_wait_s:g} s"
            self._fail(attempt, pb.FAILURE_CODE_POOL_FULL, message)
        for attempt in list(self._attempts.values()):
            if attempt.phase == "ingesting" and now >= attempt.lease_until:
                message = f"the prompt was not handed over within {self._settings.ingest_lease_s:g} s"
                self._fail(attempt, pb.FAILURE_CODE_PEER_LOST, message)
            elif attempt.starved_since is not None and now >= attempt.starved_since + self._settings.slot_wait_s:
                self._fail(attempt, pb.FAILURE_CODE_POOL_FULL, f"no slot came free within {self._settings.slot_wait_s:g} s")

    # ---- steps ----

    def _launch(self) -> None:
        """One token for each sequence that has a slot for it, the oldest first as far as the batch has places."""
        if self._step is not None or self._num_slots is None:
            return
        block_tokens = self._settings.block_tokens
        ready = [a for a in self._attempts.values() if a.phase == "running" and not a.lacks_slot(block_tokens)]
        batch = ready[: self._settings.max_batch]
        if not batch:
            return
        run = RunStep(
            self._next_step_id,
            tuple(attempt.attempt_id for attempt in batch),
            tuple(attempt.chunk() for attempt in batch),
            tuple(attempt.sampling_row for attempt in batch),
        )
        self._next_step_id += 1
        self._step = _Step(run)
        self._orders.append(run)

    def _step_ended(self, event: ev.StepDone | ev.StepFailed, now: float) -> None:
        ended = self._step
        if ended is None or ended.run.step_id != event.step_id:
            return
        self._step = None
        self._orders += ended.releases.values()
        if ended.releases:
            self._retry_growth()
        outputs: dict[int, list[pb.TokenOutput]] = {}
        for i, attempt_id in enumerate(ended.run.attempt_ids):
            attempt = self._attempts.get(attempt_id)
            # After the loss of a store an attempt of the same id would be another one, which is not running yet.
            if attempt is None or attempt.output_ids is not ended.run.sampling[i].output_ids:
                continue
            if isinstance(event, ev.StepFailed):
                self._fail(attempt, pb.FAILURE_CODE_INTERNAL, event.message)
            else:
                outputs.setdefault(attempt.session, []).append(self._append(attempt, event.sampled[i]))
        self._replies += [Reply(session, tuple(messages)) for session, messages in outputs.items()]
        if isinstance(event, ev.StepDone):
            self._recent_ms.append(event.elapsed_ms)
            repeated = max(map(len, event.sampled)) - 1
            context = sum(chunk.start + 1 for chunk in ended.run.batch) + len(ended.run.batch) * repeated // 2
            self._calibration.observe(len(ended.run.batch), context, event.elapsed_ms, now)

    def _append(self, attempt: Attempt, sampled: Sequence[SampledToken]) -> pb.TokenOutput:
        """The step has computed the KV of the attempt's last token and sampled the next, and maybe so on."""
        request, position = attempt.request, len(attempt.output_ids)
        attempt.output_ids += [token.token_id for token in sampled]
        first_block = attempt.committed_blocks
        keys = attempt.complete_blocks(self._settings.block_tokens)
        if keys:
            self._orders.append(storage.Commit(attempt.attempt_id, first_block, keys))
        output = token_output(attempt.attempt_id, sampled, position, request.params, self._settings.eos_token_ids)
        if output.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
            self._forget(attempt)
        else:
            self._grow_ahead(attempt)
        return output

    # ---- ends ----

    def _fail(self, attempt: Attempt, code: pb.FailureCode, message: str) -> None:
        self._reply_failure(attempt, code, message)
        self._forget(attempt)

    def _reply_failure(self, attempt: Attempt, code: pb.FailureCode, message: str) -> None:
        failure = pb.Failure(code=code, message=message)
        self._replies.append(Reply(attempt.session, (pb.TokenOutput(attempt_id=attempt.attempt_id, failure=failure),)))

    def _forget(self, attempt: Attempt) -> None:
        """Gives its slots back, now or when the step that uses them has ended; whoever lacks a slot asks again."""
        attempt_id = attempt.attempt_id
        del self._attempts[attempt_id]
        self._slot_queue.leave(attempt_id)
        if attempt.phase == "waiting":
            return
        release = storage.Release(attempt_id)
        if self._step is not None and attempt_id in self._step.run.attempt_ids:
            self._step.releases[attempt_id] = release
        else:
            self._orders.append(release)
            self._retry_growth()
