"""The very core of the gateway, whose clients are the requests of a workload."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from conductor.core.types import events as conductor_events
from decode_node.core import events as decode_events
from gateway import events as ev
from gateway.core import GatewayCore
from gateway.state import Limits
from node_runtime import events as node_events
from node_runtime.requests import Request
from prefill_node.core import events as prefill_events
from simulator.cluster.decode import SimDecode
from simulator.cluster.keys import prompt_keys
from simulator.cluster.loop import Loop, Mailbox, Timer
from simulator.cluster.prefill import TOKEN, SimPrefill
from simulator.cluster.records import LOST, Records
from simulator.workload import SimRequest
from springtide.blocks import blocks_for
from springtide.errors import DeadlineExceeded, Overloaded
from springtide.ids import AttemptId, BlockKey, GatewayId, InstanceId, RequestId
from springtide.protocol.attempts import Renew
from springtide.protocol.instances import Role
from springtide.protocol.scheduling import Rejection, Schedule
from springtide.protocol.wire import PREFIX_SOURCE
from springtide.rpc import common_pb2 as pb
from springtide.rpc.node_pb2 import PrefillDone, PrefillUpdate
from springtide.sampling import SamplingParams

GATEWAY = GatewayId("gateway")
MAX_NEW_TOKENS = 1 << 17
"""What clients ask for, if so much has room; how much will come, nobody knows beforehand."""
_SESSION = 0
_NAMESPACE = BlockKey(bytes(16))
_FINISHES: dict[int, ev.Finish | None] = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


class SimGateway:
    def __init__(
        self,
        records: Records,
        block_tokens: int,
        rpc_s: float,
        late_door: bool,
        context_tokens: int,
        loop: Loop,
        conductor: Callable[[conductor_events.Event], list[conductor_events.Action]],
        prefills: Mapping[InstanceId, SimPrefill],
        decodes: Mapping[InstanceId, SimDecode],
    ) -> None:
        """`context_tokens`: of the longest sequence that a decode node can hold."""
        self.records = records
        self._block_tokens, self._rpc_s, self._late_door = block_tokens, rpc_s, late_door
        self._context_tokens = context_tokens
        self._step_s = 0.0
        """Between the tokens that came last."""
        self._loop, self._conductor = loop, conductor
        self._prefills, self._decodes = prefills, decodes
        # Simulated nodes do not hang, and send no signs of life.
        self._core = GatewayCore(Limits(silence_s=math.inf, standstill_s=math.inf), GATEWAY, self._keys_of)
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
            priority=request.priority,
            deadline_ms=request.deadline_ms,
        )
        self._mailbox.post(ev.Arrived(generation))

    def tick(self) -> None:
        self._mailbox.post(ev.Tick())

    def renew(self) -> None:
        """The Conductor forgets attempts that nobody speaks for."""
        self._conductor(Renew(GATEWAY, tuple(self._core.live_attempts())))

    # ---- the instances' replies ----

    def on_prefill(self, instance_id: InstanceId, update: PrefillUpdate) -> None:
        if update.HasField("failed"):
            self._mailbox.post(_failed(update.failed, Role.PREFILL))
        else:
            self.on_prefilled(update.done)

    def on_prefilled(self, done: PrefillDone) -> None:
        """By a prefill group, or inlined."""
        self.records.cached_tokens[_index(done.output.attempt_id)] = done.cached_tokens
        self._mailbox.post(
            ev.PrefillDone(
                _output(done.output),
                done.cached_tokens,
                done.remote_tokens,
                done.fetch_ms,
                queue_ms=done.queue_ms,
                compute_ms=done.compute_ms,
            )
        )

    def on_reserved(self, attempt_id: AttemptId) -> None:
        self._mailbox.post(ev.DecodeReserved(attempt_id))

    def on_decode(self, instance_id: InstanceId, output: pb.TokenOutput, step_s: float) -> None:
        self._step_s = step_s
        if output.HasField("failure"):
            self._mailbox.post(_failed(output, Role.DECODE))
        else:
            self._mailbox.post(ev.DecodeOutput(_output(output)))

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
            case ev.StartDecode():
                self._start_decode(action)
            case ev.StartPrefill():
                self._start_prefill(action)
            case ev.Abort(side, instance_id, attempt_id):
                instances: Mapping[InstanceId, SimPrefill | SimDecode] = self._prefills if side is Role.PREFILL else self._decodes
                # One that has left its role has nothing of the attempt any more.
                if instance_id in instances:
                    instances[instance_id].tell(node_events.Abort(attempt_id))
            case ev.Report(progress):
                self._conductor(progress)
            case ev.Terminal(request_id, reply):
                self._end(int(request_id), reply)

    def _keys_of(self, generation: ev.Generation, token_ids: Sequence[int]) -> Sequence[BlockKey]:
        request = self.records.requests[int(generation.request_id)]
        return prompt_keys(request, 0, len(token_ids) // self._block_tokens, self._block_tokens)

    def _schedule(self, action: Schedule) -> None:
        max_new_tokens = max(1, min(MAX_NEW_TOKENS, self._context_tokens - action.num_tokens))
        for reply in self._conductor(replace(action, max_new_tokens=max_new_tokens, min_new_tokens=1)):
            if isinstance(reply, conductor_events.Reply):
                self._mailbox.post(_answer(reply))

    def _request(self, generation: ev.Generation, attempt_id: AttemptId, num_tokens: int, age_ms: float) -> Request:
        request = self.records.requests[int(generation.request_id)]
        return Request(
            attempt_id=attempt_id,
            request_id=generation.request_id,
            tenant=generation.tenant,
            token_ids=range(num_tokens),
            num_prompt_tokens=request.input_tokens,
            params=generation.sampling,
            namespace=_NAMESPACE,
            keys=prompt_keys(request, 0, num_tokens // self._block_tokens, self._block_tokens),
            num_blocks=blocks_for(num_tokens, self._block_tokens),
            age_s=age_ms / 1000,
        )

    def _start_decode(self, action: ev.StartDecode) -> None:
        assignment = action.assignment
        start = decode_events.Start(
            session=_SESSION,
            request=self._request(action.generation, assignment.attempt_id, len(action.token_ids), action.age_ms),
            tbt_slo_ms=assignment.tbt_slo_ms,
            inlined=assignment.inlined,
            waits=action.waits,
            refusable=assignment.refusable and not self._late_door,
            expected_tokens=assignment.prediction.output_tokens,
        )
        self._decodes[assignment.decode.instance_id].tell(start)

    def _start_prefill(self, action: ev.StartPrefill) -> None:
        assignment = action.assignment
        instance_id = assignment.prefill.instance_id
        if instance_id not in self._prefills:
            # It has left its role while the attempt waited for room at its decode node.
            self._mailbox.post(ev.SessionLost(Role.PREFILL, instance_id, (assignment.attempt_id,), connected=False))
            return
        start = prefill_events.Start(
            session=_SESSION,
            request=self._request(action.generation, assignment.attempt_id, len(action.token_ids), action.age_ms),
            decode_store_address=assignment.decode.store_address,
            decode_store_node_id=assignment.decode.node_id,
            ttft_budget_ms=action.ttft_budget_ms,
            sources=tuple(map(PREFIX_SOURCE.encode, assignment.sources)),
        )
        self._prefills[instance_id].tell(start)

    def _end(self, index: int, reply: ev.Finished | ev.Failed | ev.Cancelled) -> None:
        if isinstance(reply, ev.Finished):
            self.records.finish(index, self._loop.now, reply.cached_tokens)
        elif isinstance(reply, ev.Failed):
            refused = isinstance(reply.error, Overloaded | DeadlineExceeded)
            self.records.reject(index, reply.error.code if refused and reply.error.code else LOST)


def _index(attempt_id: str) -> int:
    return int(attempt_id.partition(".")[0])


def _answer(reply: conductor_events.Reply) -> ev.Event:
    if reply.assignment is not None:
        return ev.Assigned(reply.assignment)
    assert isinstance(reply.outcome, Rejection)
    return ev.Rejected(reply.attempt_id, reply.outcome)


def _failed(output: pb.TokenOutput, side: Role) -> ev.AttemptFailed:
    return ev.AttemptFailed(AttemptId(output.attempt_id), side, output.failure.code, output.failure.message)


def _output(output: pb.TokenOutput) -> ev.Output:
    tokens = (TOKEN,) * len(output.token_ids)
    return ev.Output(AttemptId(output.attempt_id), output.position, tokens, _FINISHES[output.finish_reason])
