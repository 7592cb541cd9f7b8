"""A decode instance: the very core of decode_node/, whose steps take the time that the hardware model gives them.

As long as nothing happens to an instance its batch stays as it is, so steps are taken many at a time; whatever does happen to it finds
the step under way that would be under way, and the next one begins when that one ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from decode_node.core import DecodeCore
from decode_node.core import events as ev
from decode_node.core.actions import Action, LoadAhead, RunStep
from decode_node.core.settings import DecodeSettings
from node_runtime import events as node_events
from simulator.cluster.loop import Loop, Mailbox
from simulator.cluster.prefill import TOKEN
from simulator.cluster.processor import Compute, Job
from simulator.cluster.store import SimStore
from simulator.hardware import Hardware
from simulator.workload import SimRequest
from springtide.clock import Tick
from springtide.ids import AttemptId, InstanceId
from springtide.protocol import storage
from springtide.protocol.instances import Load
from springtide.protocol.outputs import DecodeUpdate


class Gateway(Protocol):
    """What a decode instance needs of it."""

    def on_decode(self, instance_id: InstanceId, update: DecodeUpdate, step_s: float) -> None: ...

    def on_refused_late(self, attempt_id: AttemptId) -> None: ...

    def request_of(self, attempt_id: str) -> SimRequest: ...


class _Steps:
    """So many steps of the same batch, which began at `began`."""

    def __init__(self, run: RunStep, began: float, count: int, hardware: Hardware) -> None:
        self.run = run
        self.began = began
        self.count = count
        self._hardware = hardware
        # As the decode node itself takes it: a token of a prompt is no dearer than a sequence more of the same context.
        self._batch = run.num_tokens
        self._context = sum(row.num_tokens * (row.start + row.num_tokens) for row in run.rows) if run.has_prompts else run.context_tokens

    def seconds(self, count: int) -> float:
        return self._hardware.steps_ms(self._batch, self._context, count) / 1000

    def cut(self, done_s: float) -> float:
        """After so many seconds of work, the step under way becomes the last. Returns the seconds of all."""
        self.count = self._hardware.steps_begun(self._batch, self._context, self.count, 1000 * done_s)
        return max(self.seconds(self.count), done_s)


class SimDecode:
    def __init__(
        self,
        instance_id: InstanceId,
        store: SimStore,
        hardware: Hardware,
        settings: DecodeSettings,
        late_tbt_slo_ms: float | None,
        loop: Loop,
        compute: Compute,
        gateway: Gateway,
        changed: Callable[[], None],
    ) -> None:
        """`late_tbt_slo_ms`: see Options."""
        self.instance_id = instance_id
        self.store = store
        self._hardware, self._settings, self._loop, self._compute = hardware, settings, loop, compute
        self._late_tbt_slo_ms, self._gateway, self._changed = late_tbt_slo_ms, gateway, changed
        self._core = DecodeCore(settings)
        self._mailbox: Mailbox[ev.Event] = Mailbox(self._handle)
        self._steps: _Steps | None = None
        self._job: Job | None = None
        store.notify = self.tell
        self.busy_s = 0.0
        self._step_s = 0.0
        """Of the steps that ended last, the mean."""
        self.tell(node_events.StoreConnected(store.pool.num_slots))

    def tell(self, event: ev.Event) -> None:
        self._mailbox.post(event)

    def load(self) -> Load:
        return self._core.load(self.store.pool.num_slots, self.store.slots_available)

    @property
    def has_work(self) -> bool:
        """Attempts are here, or what they computed is still on its way elsewhere."""
        return self._core.has_work

    def leave(self) -> tuple[AttemptId, ...]:
        """The engine ends, and nothing reaches it any more. Returns the attempts that it had not ended."""
        if self._steps is not None:
            self._cut()
        self._mailbox = Mailbox(lambda event: None)
        self.store.engine_left()
        return tuple(self.load().attempt_ids)

    def tick(self) -> None:
        if self._core.has_waiting:
            self.tell(Tick())

    def validate(self) -> None:
        self._core.validate()

    def _handle(self, event: ev.Event) -> None:
        if isinstance(event, storage.Ingested) and self._refuses(event):
            self._gateway.on_refused_late(AttemptId(event.attempt_id))
            return
        if self._steps is not None and not isinstance(event, ev.StepDone | storage.Grown):
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
            case RunStep():
                self._run(action)
            case LoadAhead():
                raise AssertionError("the simulated engine computes in its arena")
            case node_events.SendUpdate(_, update):
                self._gateway.on_decode(self.instance_id, update, self._step_s)
            case _:
                self.store.order(action)

    def _run(self, run: RunStep) -> None:
        block_tokens = self._settings.block_tokens
        count = (
            1
            if run.has_prompts
            else min(min(row.sampling.params.max_tokens - row.position, len(row.slots) * block_tokens - row.start) for row in run.rows)
        )
        self._steps = _Steps(run, self._loop.now, count, self._hardware)
        self._job = self._compute(self._steps.seconds(count), self._done)

    def _cut(self) -> None:
        assert self._steps is not None and self._job is not None
        if self._steps.count > 1:
            self._job.resize(self._steps.cut(self._job.progress_now()))

    def _done(self) -> None:
        steps = self._steps
        assert steps is not None
        self._steps = self._job = None
        seconds = self._loop.now - steps.began
        self.busy_s += seconds
        self._step_s = seconds / steps.count
        tokens = (TOKEN,) * steps.count
        self.tell(ev.StepDone(steps.run.step_id, [tokens if row.samples else None for row in steps.run.rows], 1000 * self._step_s))
