"""The very core of the gateway, whose clients are the requests of a workload."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from conductor.core.types import events as conductor_events
from gateway import events as ev
from gateway.core import GatewayCore
from gateway.state import Limits
from node_runtime.events import Start
from simulator.cluster.keys import prompt_keys
from simulator.cluster.loop import Loop, Mailbox, Timer
from simulator.cluster.mixed import SimMixed
from simulator.cluster.prefill import SimPrefill
from simulator.cluster.records import LOST, Records
from simulator.workload import SimRequest
from springtide.clock import Tick
from springtide.errors import DeadlineExceeded, Overloaded
from springtide.ids import AttemptId, BlockKey, GatewayId, InstanceId, RequestId
from springtide.protocol.attempts import Renew
from springtide.protocol.instances import Role
from springtide.protocol.outputs import AttemptFailed, DecodeUpdate, PrefillDone, PrefillUpdate
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.scheduling import Rejection, Schedule, Terms
from springtide.protocol.starts import AbortAttempt

GATEWAY = GatewayId("gateway")
MAX_NEW_TOKENS = 1 << 17
"""What clients ask for, if so much has room; how much will come, nobody knows beforehand."""
_SESSION = 1
_NAMESPACE = BlockKey(bytes(16))


class SimGateway:
    def __init__(
        self,
        records: Records,
        block_tokens: int,
        rpc_s: float,
        checks_late: bool,
        context_tokens: int,
        loop: Loop,
        conductor: Callable[[conductor_events.Event], list[conductor_events.Action]],
        prefills: Mapping[InstanceId, SimPrefill | SimMixed],
        decodes: Mapping[InstanceId, SimMixed],
    ) -> None:
        """`context_tokens`: of the longest sequence that a decode node can hold."""
        self.records = records
        self._block_tokens, self._rpc_s, self._checks_late = block_tokens, rpc_s, checks_late
        self._context_tokens = context_tokens
        self._step_s = 0.0
        """Between the tokens that came last."""
        self._loop, self._conductor = loop, conductor
        self._prefills, self._decodes = prefills, decodes
        # Simulated nodes do not hang, and send no signs of life.
        self.num_moved = 0
        self._decoding_at: dict[RequestId, InstanceId] = {}
        """Of those that run."""
        self._moving: dict[AttemptId, InstanceId] = {}
        """Where the attempts decode to which these are successors."""
        self._core = GatewayCore(Limits(silence_s=math.inf, standstill_s=math.inf), GATEWAY, SimHashing(records, block_tokens))
        self._mailbox: Mailbox[ev.Event] = Mailbox(self._handle)
        self._retry: Timer | None = None

    def request_of(self, attempt_id: str) -> SimRequest:
        return self.records.requests[_index(attempt_id)]

    def arrive(self, index: int) -> None:
        request = self.records.requests[index]
        sampling = SamplingParams(max_tokens=max(1, request.output_tokens), ignore_eos=True)
        generation = ev.Generation(
            RequestId(str(index)),
            range(request.input_tokens),
            sampling,
            tenant=request.tenant,
            terms=Terms(request.priority, request.deadline_ms, request.idle),
        )
        self._mailbox.post(ev.Arrived(generation))

    def move(self, attempt_ids: tuple[AttemptId, ...]) -> None:
        """The Conductor wants these to decode elsewhere."""
        self._mailbox.post(ev.MovesWanted(attempt_ids))

    def tick(self) -> None:
        self._mailbox.post(Tick())

    def renew(self) -> None:
        """The Conductor forgets attempts that nobody speaks for."""
        self._conductor(Renew(GATEWAY, tuple(self._core.live_attempts())))

    # ---- the instances' replies ----

    def on_prefill(self, instance_id: InstanceId, update: PrefillUpdate) -> None:
        if isinstance(update, AttemptFailed):
            self._mailbox.post(ev.SideFailed(Role.PREFILL, update))
        elif isinstance(update, PrefillDone):
            self.on_prefilled(update)

    def on_prefilled(self, done: PrefillDone) -> None:
        """Takes in that a prompt is computed, by a prefill group or inlined."""
        if done.output.position == 0:
            self.records.cached_tokens[_index(done.output.attempt_id)] = done.cached_tokens
        source = self._moving.pop(done.output.attempt_id, None)
        self._when_told(source, lambda: self._mailbox.post(done))

    def _when_told(self, decode_id: InstanceId | None, do: Callable[[], None]) -> None:
        """Once what the instance has made by now has come here: its steps are taken many at once. None: at once."""
        instance = None if decode_id is None else self._decodes.get(decode_id)
        if instance is None:
            do()
        else:
            self._loop.after(instance.end_steps() + self._rpc_s, do)

    def on_reserved(self, attempt_id: AttemptId) -> None:
        self._mailbox.post(ev.DecodeReserved(attempt_id))

    def on_decode(self, instance_id: InstanceId, update: DecodeUpdate, step_s: float) -> None:
        for attempt_id in update.reserved:
            self.on_reserved(attempt_id)
        for done in update.prefilled:
            self.on_prefilled(done)
        self._step_s = step_s
        for output in update.outputs:
            self._mailbox.post(output)
        for failed in update.failed:
            self._mailbox.post(ev.SideFailed(Role.DECODE, failed))

    def on_refused_late(self, attempt_id: AttemptId) -> None:
        """The decode node does not take what has been prefilled for it: the request ends here."""
        index = _index(attempt_id)
        self.records.reject(index, "tbt_after_prefill")
        self._mailbox.post(ev.ClientGone(RequestId(str(index))))

    def on_session_lost(self, side: Role, instance_id: InstanceId, attempt_ids: tuple[AttemptId, ...]) -> None:
        """The instance has left before it could end these."""
        self._mailbox.post(ev.SessionLost(side, instance_id, attempt_ids, connected=True))

    # ---- what the core decides ----

    def _handle(self, event: ev.Event) -> None:
        for action in self._core.handle(event, self._loop.now):
            self._do(action)
        self._set_retry()

    def _set_retry(self) -> None:
        deadline = self._core.next_deadline()
        if deadline is None and self._retry is None:
            return
        if self._retry is not None and deadline != self._retry.when:
            self._retry.cancel()
            self._retry = None
        if deadline is not None and self._retry is None:
            self._retry = self._loop.at(deadline, self._retry_now)

    def _retry_now(self) -> None:
        self._retry = None
        self.tick()

    def _do(self, action: ev.Action) -> None:
        match action:
            case ev.Emit(request_id, tokens):
                self.records.tokens(int(request_id), len(tokens), self._loop.now + self._rpc_s, self._step_s)
            case Schedule():
                self._loop.after(self._rpc_s, lambda: self._schedule(action))
            case ev.StartAtDecode(instance, order, successor):
                if successor:
                    self._moving[order.request.attempt_id] = self._decoding_at[order.request.request_id]
                else:
                    self._decoding_at[order.request.request_id] = instance.instance_id
                order = replace(order, refusable=order.refusable and not self._checks_late)
                self._decodes[instance.instance_id].tell(Start(_SESSION, order))
            case ev.StartAtPrefill():
                self._start_prefill(action)
            case ev.Abort(side, instance_id, attempt_id):
                instances: Mapping[InstanceId, SimPrefill | SimMixed] = self._prefills if side is Role.PREFILL else self._decodes
                # One that has left its role has nothing of the attempt any more.
                if instance_id in instances:
                    instances[instance_id].tell(AbortAttempt(attempt_id))
            case ev.Report(progress):
                self._conductor(progress)
            case ev.Moved(request_id, _, target):
                self._decoding_at[request_id] = target
                self.num_moved += 1
            case ev.TellPlaced(placed):
                self._conductor(conductor_events.Placed(GATEWAY, placed))
            case ev.Terminal(request_id, reply):
                self._end(int(request_id), reply)

    def _schedule(self, action: Schedule) -> None:
        if action.successor_of:
            source = self._decoding_at.get(action.request_id)
            self._when_told(source, lambda: self._ask(action))
        else:
            self._ask(action)

    def _ask(self, action: Schedule) -> None:
        max_new_tokens = max(1, min(MAX_NEW_TOKENS, self._context_tokens - action.num_tokens))
        for decided in self._conductor(replace(action, max_new_tokens=max_new_tokens, min_new_tokens=1)):
            if isinstance(decided, conductor_events.Decided):
                self._mailbox.post(_answer(decided))

    def _start_prefill(self, action: ev.StartAtPrefill) -> None:
        instance_id, attempt_id = action.instance.instance_id, action.start.request.attempt_id
        if instance_id not in self._prefills:
            # It has left its role while the attempt waited for room at its decode node.
            self._mailbox.post(ev.SessionLost(Role.PREFILL, instance_id, (attempt_id,), connected=False))
            return
        self._prefills[instance_id].tell(Start(_SESSION, action.start))

    def _end(self, index: int, reply: ev.Finished | ev.Failed | ev.Cancelled) -> None:
        self._decoding_at.pop(RequestId(str(index)), None)
        if isinstance(reply, ev.Finished):
            self.records.finish(index, self._loop.now, reply.cached_tokens)
        elif isinstance(reply, ev.Failed):
            refused = isinstance(reply.error, Overloaded | DeadlineExceeded)
            self.records.reject(index, reply.error.code if refused and reply.error.code else LOST)


def _index(attempt_id: str) -> int:
    return int(attempt_id.partition(".")[0])


def _answer(decided: conductor_events.Decided) -> ev.Event:
    if decided.assignment is not None:
        return decided.assignment
    assert isinstance(decided.decision, Rejection)
    return ev.Rejected(decided.attempt_id, decided.decision)


class SimHashing:
    """The keys of prompts whose tokens nobody knows: a trace tells which blocks they share."""

    def __init__(self, records: Records, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._records = records

    def namespace(self, generation: ev.Generation) -> BlockKey:
        return _NAMESPACE

    def keys(self, generation: ev.Generation, token_ids: Sequence[int], known: tuple[BlockKey, ...] = ()) -> tuple[BlockKey, ...]:
        request = self._records.requests[int(generation.request_id)]
        return prompt_keys(request, 0, len(token_ids) // self.block_tokens, self.block_tokens)
