"""A prefill instance: the very core of prefill_node/, whose passes take the time that the hardware model gives them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from node_runtime import events as node_events
from prefill_node.core import PrefillCore
from prefill_node.core import events as ev
from prefill_node.core.actions import Action, GiveWay, Prefilled, PrefixShared, RunPass
from prefill_node.core.layer_stream import LayerGroups
from prefill_node.core.settings import PrefillSettings
from simulator.cluster.loop import Loop, Mailbox
from simulator.cluster.processor import Compute
from simulator.cluster.store import LAYER_GROUPS, SimStore
from simulator.hardware import Hardware
from springtide.chunking import Chunking
from springtide.clock import Tick
from springtide.ids import AttemptId, InstanceId
from springtide.protocol import storage
from springtide.protocol.instances import Load, Role
from springtide.protocol.outputs import PrefillUpdate, SampledToken

TOKEN = SampledToken(1)
"""Every token is this one: what is computed, nobody sees."""


@dataclass(frozen=True, slots=True)
class _SimPass:
    """A pass in flight, of so many seconds in all stages together. It cannot end before `arrived`."""

    run: RunPass
    began: float
    compute_s: float
    arrived: float


def layer_groups(hardware: Hardware, block_tokens: int) -> LayerGroups:
    """How a simulated prompt's KV is cut on its way to the decode side."""
    bytes_per_slab = -(-hardware.kv_bytes_per_token * block_tokens // LAYER_GROUPS)
    return LayerGroups(LAYER_GROUPS, bytes_per_slab, unit_bytes=1)


class SimPrefill:
    def __init__(
        self,
        instance_id: InstanceId,
        store: SimStore,
        hardware: Hardware,
        stage_shares: Sequence[float],
        chunk_tokens: int,
        chunk_ms: float | None,
        block_tokens: int,
        loop: Loop,
        compute: Compute,
        reply: Callable[[InstanceId, PrefillUpdate], None],
        changed: Callable[[], None],
    ) -> None:
        self.instance_id = instance_id
        self.store = store
        self._hardware, self._loop, self._compute, self._reply, self._changed = hardware, loop, compute, reply, changed
        groups = layer_groups(hardware, block_tokens)
        cost = replace(hardware.prefill_cost, slowest_share=max(stage_shares))
        chunking = Chunking(cost, chunk_tokens, chunk_ms)
        self._core = PrefillCore(PrefillSettings(chunking, groups, block_tokens, eos_token_ids=(), num_stages=len(stage_shares)))
        self._shares = stage_shares
        self._stages: list[deque[_SimPass]] = [deque() for _ in stage_shares]
        """The passes that each stage has to do: it is at the first."""
        self._last_end = 0.0
        self._mailbox: Mailbox[ev.Event] = Mailbox(self._handle)
        store.notify = self.tell
        self.busy_s = 0.0
        self.tell(node_events.StoreConnected(store.pool.num_slots))

    def tell(self, event: ev.Event) -> None:
        self._mailbox.post(event)

    def load(self, role: Role = Role.PREFILL) -> Load:
        """It has no other role."""
        return self._core.load(self.store.pool.num_slots, self.store.slots_available)

    @property
    def has_work(self) -> bool:
        """Attempts are here, or what they computed is still on its way elsewhere."""
        return self._core.has_work

    def leave(self) -> tuple[AttemptId, ...]:
        """The engine ends, and nothing reaches it any more. Returns the attempts that it had not ended."""
        self._mailbox = Mailbox(lambda event: None)
        self.store.engine_left()
        return tuple(self.load().attempt_ids)

    def tick(self) -> None:
        if self._core.has_work:
            self.tell(Tick())

    def validate(self) -> None:
        self._core.validate()

    def _handle(self, event: ev.Event) -> None:
        for action in self._core.handle(event, self._loop.now):
            self._do(action)
        self._changed()

    def _do(self, action: Action) -> None:
        match action:
            case RunPass():
                self._run(action)
            case node_events.SendUpdate(_, update):
                self._reply(self.instance_id, update)
            case storage.Push():
                pass  # Whole passes at once, when they have ended: `_ran`.
            case Prefilled() | PrefixShared():
                raise AssertionError("nobody decodes here")
            case GiveWay():
                pass  # It was through: who comes waits for its end, an eighth of a chunk.
            case _:
                self.store.order(action)

    def _run(self, run: RunPass) -> None:
        """Each layer waits for the prefix's slabs of that layer: a prefix that arrives while it is read costs what is not hidden."""
        compute_s = self._hardware.pass_ms([(len(row.chunk.token_ids), row.chunk.start) for row in run.rows]) / 1000
        arrived = 0.0 if run.awaits is None else self.store.fetched_at(run.awaits) + compute_s / self._hardware.num_layers
        self._enter(0, _SimPass(run, self._loop.now, compute_s, arrived))

    def _enter(self, stage: int, one: _SimPass) -> None:
        """Activations take no time from stage to stage: a chunk's are some megabytes."""
        self._stages[stage].append(one)
        if len(self._stages[stage]) == 1:
            self._work(stage)

    def _work(self, stage: int) -> None:
        one = self._stages[stage][0]
        self._compute(self._shares[stage] * one.compute_s, lambda: self._computed(stage, one))

    def _computed(self, stage: int, one: _SimPass) -> None:
        if stage + 1 < len(self._stages):
            self._next(stage)
            self._enter(stage + 1, one)
            if stage == 0:
                self.tell(ev.PassLeft(one.run.pass_id))
        elif one.arrived > self._loop.now:
            self._loop.at(one.arrived, lambda: self._ran(one))
        else:
            self._ran(one)

    def _next(self, stage: int) -> None:
        self._stages[stage].popleft()
        if self._stages[stage]:
            self._work(stage)

    def _ran(self, one: _SimPass) -> None:
        run, began, now = one.run, one.began, self._loop.now
        self._next(len(self._stages) - 1)
        elapsed_s = now - max(began, self._last_end)
        self._last_end = now
        self.busy_s += elapsed_s
        for attempt_id, blocks in pushed_by(run).items():
            self.store.push(attempt_id, blocks, began, now)
        sampled = tuple(None if row.sampling is None else TOKEN for row in run.rows)
        self.tell(ev.PassDone(run.pass_id, sampled, elapsed_s * 1000))


def pushed_by(run: RunPass) -> dict[AttemptId, range]:
    """The blocks that this pass makes final."""
    return {push.attempt_id: range(push.block_begin, push.block_end) for push in run.pushes}
