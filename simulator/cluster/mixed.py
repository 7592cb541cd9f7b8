"""An instance that prefills and decodes, or decodes alone: the very core of mixed_node/, whose steps take the time that the hardware model
gives them.

As long as nothing happens to an instance its batch stays as it is, so steps without prompts are taken many at a time; whatever does happen
to it finds the step under way that would be under way, and the next one begins when that one ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from decode_node.core import events as decoding
from decode_node.core.actions import LoadAhead, RunStep
from decode_node.core.settings import DecodeSettings
from mixed_node.core import MixedCore
from mixed_node.core import events as ev
from mixed_node.core.actions import Action, RunMixed
from node_runtime import events as node_events
from prefill_node.core import events as prefilling
from prefill_node.core.actions import GiveWay, RunPass
from prefill_node.core.settings import PrefillSettings
from simulator.cluster.loop import Loop, Mailbox
from simulator.cluster.prefill import TOKEN, pushed_by
from simulator.cluster.processor import Compute, Job
from simulator.cluster.store import SimStore
from simulator.hardware import Hardware
from simulator.workload import SimRequest
from springtide.clock import Tick
from springtide.ids import AttemptId, InstanceId
from springtide.protocol import storage
from springtide.protocol.instances import Load, Role
from springtide.protocol.outputs import DecodeUpdate, PrefillUpdate


class Gateway(Protocol):
    """What such an instance needs of it."""

    def on_prefill(self, instance_id: InstanceId, update: PrefillUpdate) -> None: ...

    def on_decode(self, instance_id: InstanceId, update: DecodeUpdate, step_s: float) -> None: ...

    def on_refused_late(self, attempt_id: AttemptId) -> None: ...

    def request_of(self, attempt_id: str) -> SimRequest: ...


class _Steps:
    """So many steps of the same batch, which began at `began`; with chunks of prompts, one."""

    def __init__(self, mixed: RunMixed, began: float, count: int, hardware: Hardware) -> None:
        self.mixed = mixed
        self.began = began
        self.count = count
        self._hardware = hardware
        self._batch, self._context = (0, 0) if mixed.step is None else (len(mixed.step.rows), mixed.step.context_tokens)

    def seconds(self, count: int) -> float:
        if self.mixed.run is None:
            return self._hardware.steps_ms(self._batch, self._context, count) / 1000
        rows = [(len(row.chunk.token_ids), row.chunk.start) for row in self.mixed.run.rows]
        return self._hardware.mixed_ms(rows, self._batch, self._context) / 1000

    def cut(self, done_s: float) -> float:
        """After so many seconds of work, the step under way becomes the last. Returns the seconds of all."""
        self.count = self._hardware.steps_begun(self._batch, self._context, self.count, 1000 * done_s)
        return max(self.seconds(self.count), done_s)


class SimMixed:
    def __init__(
        self,
        instance_id: InstanceId,
        store: SimStore,
        hardware: Hardware,
        prefill: PrefillSettings,
        decode: DecodeSettings,
        late_tbt_slo_ms: float | None,
        loop: Loop,
        compute: Compute,
        gateway: Gateway,
        changed: Callable[[], None],
        pages: int | None = None,
    ) -> None:
        """`late_tbt_slo_ms`: see Options. `pages`: blocks that it can compute with at a time; None: all of the store's."""
        self.instance_id = instance_id
        self.store = store
        self._hardware, self._block_tokens, self._loop, self._compute = hardware, decode.block_tokens, loop, compute
        self._late_tbt_slo_ms, self._gateway, self._changed = late_tbt_slo_ms, gateway, changed
        self._core = MixedCore(prefill, decode)
        self._mailbox: Mailbox[ev.Event] = Mailbox(self._handle)
        self._steps: _Steps | None = None
        self._job: Job | None = None
        store.notify = self.tell
        self.busy_s = 0.0
        self._step_s = 0.0
        """Of the steps that ended last, the mean."""
        most = store.pool.num_slots if pages is None else min(pages, store.pool.num_slots)
        self.tell(node_events.StoreConnected(most, pages))

    def tell(self, event: ev.Event) -> None:
        self._mailbox.post(event)

    def load(self, role: Role = Role.DECODE) -> Load:
        """Of what it does in the role."""
        load = self._core.prefill_load if role is Role.PREFILL else self._core.load
        return load(self.store.pool.num_slots, self.store.slots_available)

    @property
    def has_work(self) -> bool:
        """Attempts are here, or what they computed is still on its way elsewhere."""
        return self._core.has_work

    def end_steps(self) -> float:
        """Makes the step under way the last of those that are taken at once; returns how long it lasts (s)."""
        if self._steps is None or self._job is None:
            return 0.0
        self._cut()
        return max(0.0, self._steps.seconds(self._steps.count) - self._job.progress_now())

    def leave(self) -> tuple[AttemptId, ...]:
        """The engine ends, and nothing reaches it any more. Returns the attempts that it had not ended."""
        if self._steps is not None:
            self._cut()
        self._mailbox = Mailbox(lambda event: None)
        self.store.engine_left()
        return tuple(self.load().attempt_ids)

    def tick(self) -> None:
        if self._core.prefill.has_work or self._core.decode.has_waiting:
            self.tell(Tick())

    def validate(self) -> None:
        self._core.validate()

    def _handle(self, event: ev.Event) -> None:
        if isinstance(event, storage.Ingested) and self._refuses(event):
            self._gateway.on_refused_late(AttemptId(event.attempt_id))
            return
        if self._steps is not None and not isinstance(event, ev.MixedDone | storage.Grown):
            self._cut()
        for action in self._core.handle(event, self._loop.now):
            self._do(action)
        self._changed()

    def _refuses(self, arrived: storage.Ingested) -> bool:
        if self._late_tbt_slo_ms is None:
            return False
        load, tokens = self.load(), self._gateway.request_of(arrived.attempt_id).input_tokens
        return self._hardware.step_ms(load.running + 1, load.tokens + tokens) > self._late_tbt_slo_ms

    def _do(self, action: Action) -> None:
        match action:
            case RunMixed():
                self._run(action)
            case LoadAhead():
                raise AssertionError("the simulated engine computes in its arena")
            case node_events.SendUpdate(_, update):
                if isinstance(update, DecodeUpdate):
                    self._gateway.on_decode(self.instance_id, update, self._step_s)
                else:
                    self._gateway.on_prefill(self.instance_id, update)
            case storage.Push():
                pass  # Whole passes at once, when they have ended.
            case GiveWay():
                pass  # It was through: who comes waits for its end, an eighth of a chunk.
            case _:
                self.store.order(action)

    def _run(self, mixed: RunMixed) -> None:
        count = 1 if mixed.step is None or mixed.run is not None else self._most_steps(mixed.step)
        self._steps = _Steps(mixed, self._loop.now, count, self._hardware)
        self._job = self._compute(self._steps.seconds(count), self._done)

    def _most_steps(self, step: RunStep) -> int:
        """Until an output ends, or lacks a slot."""
        return min(min(row.sampling.params.max_tokens - row.position, len(row.slots) * self._block_tokens - row.start) for row in step.rows)

    def _cut(self) -> None:
        assert self._steps is not None and self._job is not None
        if self._steps.count > 1:
            self._job.resize(self._steps.cut(self._job.progress_now()))

    def _done(self) -> None:
        steps, now = self._steps, self._loop.now
        assert steps is not None
        self._steps = self._job = None
        seconds = now - steps.began
        self.busy_s += seconds
        self._step_s = seconds / steps.count
        elapsed_ms, step, run = 1000 * self._step_s, steps.mixed.step, steps.mixed.run
        stepped = None if step is None else decoding.StepDone(step.step_id, [(TOKEN,) * steps.count] * len(step.rows), elapsed_ms)
        self.tell(ev.MixedDone(stepped, None if run is None else self._ran(run, steps.began, elapsed_ms)))

    def _ran(self, run: RunPass, began: float, elapsed_ms: float) -> prefilling.PassDone:
        for attempt_id, blocks in pushed_by(run).items():
            self.store.push(attempt_id, blocks, began, self._loop.now)
        return prefilling.PassDone(run.pass_id, tuple(None if row.sampling is None else TOKEN for row in run.rows), elapsed_ms)
