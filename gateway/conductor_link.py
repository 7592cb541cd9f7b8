"""The way to the Conductor: found through membership unless its address is given, and found again after it was lost.

Of several Conductors the one that leads is asked; all are told how attempts get on, so that each could lead from one moment to the next.
`LeaderView` decides who leads, `ConductorLink` asks and tells, `ConductorPeer` is the connection to one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc
import grpc.aio

from gateway import metrics
from gateway.questions import LOST, Questions, Unanswered
from springtide.credentials import OPEN, Credentials
from springtide.errors import Unavailable
from springtide.ids import GatewayId
from springtide.leader_lease import LeaderLease
from springtide.membership import Membership
from springtide.protocol import wire
from springtide.protocol.attempts import AttemptReport, LiveAttempt, Phase, Renew
from springtide.protocol.observation import Explain, Explanation, Observe, ObservedPart
from springtide.protocol.scheduling import Assignment, GatewayOrders, Schedule, ScheduleReply
from springtide.protocol.status import ClusterStatus
from springtide.rpc import conductor_pb2
from springtide.rpc.channels import connect
from springtide.rpc.conductor_pb2_grpc import ConductorStub
from springtide.rpc.observation_pb2_grpc import ObserverStub
from springtide.supervision import end, first_of, supervised

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
RENEW_EVERY_S = 2.0
_FOLLOW_AGAIN_S = 0.5
_GRACE_S = CALL_TIMEOUT_S + 1.0
"""For calls in flight to end by themselves: a channel that is closed before cancels them, and with them whoever waits."""
MOST_KEPT = 4096
"""Reports that wait for a Conductor, some 100 bytes each; the oldest are lost first."""
_MOST_SENT = 1024
"""In one message: some 20 ms of its receiver's time."""
_LOOK_EVERY_S = 0.2
_PAUSE_S = 0.1
_CLOSE_S = 0.3
ReplyT = TypeVar("ReplyT")


@dataclass(slots=True)
class LeaderView:
    """The Conductor that is taken for the leader, and whose answers are accepted. Pure. To ask the wrong one costs a round trip; to believe
    it is what `accepts` prevents: an epoch that was seen is never gone back on."""

    epoch: int = 0
    """The highest seen; 0 while the cluster has one Conductor only."""
    address: str | None = None
    """Who leads, as last heard."""
    doubted: bool = False
    """It did not answer, or not as a leader does: the others may know of another."""

    def read(self, address: str, epoch: int) -> bool:
        """Takes note that the lease, or membership, names `address`. A lease of a lower epoch than was seen means that Valkey has lost its
        count; the holder finds out when it is asked. Returns whether the leader is another now."""
        self.epoch = max(self.epoch, epoch)
        if address == self.address:
            return False
        self.address, self.doubted = address, False
        return True

    def answered(self, address: str, epoch: int) -> bool:
        """Takes note that the Conductor at `address` has decided under an epoch that `accepts`. Returns whether the leader is another
        now."""
        changed = self.read(address, epoch)
        self.doubted = False
        return changed

    def hinted(self, by: str, address: str, epoch: int) -> bool:
        """Takes note that the Conductor `by` does not lead and says who does, if it knows. Returns whether the leader is another now."""
        if by == self.address:
            self.doubted = True
        if epoch < self.epoch:
            return False
        self.epoch = epoch
        return bool(address) and self.read(address, epoch)

    def lost(self, address: str) -> None:
        """Takes note that the Conductor at `address` does not answer."""
        self.doubted = self.doubted or address == self.address

    @property
    def in_doubt(self) -> bool:
        """Nobody is known who is likely to decide."""
        return self.address is None or self.doubted

    def accepts(self, epoch: int) -> bool:
        """Whether an answer given under `epoch` counts: not when it is a deposed leader's."""
        return epoch == 0 or epoch >= self.epoch


class ConductorLink:
    """All Conductors as the gateway sees them: asks the one that leads, tells them all."""

    def __init__(
        self,
        gateway_id: GatewayId,
        membership: Membership,
        live_attempts: Callable[[], Sequence[LiveAttempt]],
        on_orders: Callable[[GatewayOrders], None],
        address: str | None = None,
        lease: LeaderLease | None = None,
        patience_s: float = 0.0,
        credentials: Credentials = OPEN,
    ) -> None:
        """`on_orders` is told what is to be done with attempts that run, by the Conductor that leads. `address` fixes the Conductor's;
        without it, membership says where it is. With a `lease` there are several, and it says who leads; while nobody does, a request waits
        for `patience_s`, and of all that wait one is asked again and again."""
        self._gateway_id = gateway_id
        self._membership = membership
        self._live_attempts = live_attempts
        self._on_orders = on_orders
        self._fixed = address
        self._lease = lease
        self._patience_s = patience_s
        self._credentials = credentials
        self._leader = LeaderView(address=address)
        self._changed = asyncio.Event()
        """Set, and replaced, when the leader is another."""
        self._looking = asyncio.Lock()
        """Whose request is asked while the leader is in doubt has it: asked by all that wait, a standby would have no time to lead."""
        self._peers: dict[str, ConductorPeer] = {}
        self._turns = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        if self._fixed is not None:
            self._follow_exactly([self._fixed])
            return
        self._tasks = [supervised(self._follow_members, "conductor-members")]
        if (lease := self._lease) is not None:
            self._tasks.append(supervised(lambda: self._follow_lease(lease), "conductor-leader"))

    async def close(self) -> None:
        """Reports what is still to be reported, if the Conductors take it at once, and hangs up."""
        await end(*self._tasks, *self._closing)
        await asyncio.gather(*(peer.close(_CLOSE_S) for peer in self._peers.values()))
        if self._lease is not None:
            await self._lease.close()

    async def schedule(self, request: Schedule) -> ScheduleReply:
        """Raises Unavailable when the Conductor cannot be asked or does not answer, or nobody leads for too long."""
        give_up_at = asyncio.get_running_loop().time() + self._patience_s
        while True:
            if self._lease is not None and self._leader.in_doubt:
                async with self._turn_to_look(give_up_at):
                    while self._leader.in_doubt:
                        if (reply := await self._asked(request, give_up_at)) is not None:
                            return reply
            if (reply := await self._asked(request, give_up_at)) is not None:
                return reply

    @asynccontextmanager
    async def _turn_to_look(self, give_up_at: float) -> AsyncIterator[None]:
        """Raises Unavailable when it does not come in time."""
        try:
            async with asyncio.timeout_at(give_up_at):
                await self._looking.acquire()
        except TimeoutError:
            raise _nobody_leads() from None
        try:
            yield
        finally:
            self._looking.release()

    async def _asked(self, request: Schedule, give_up_at: float) -> ScheduleReply | None:
        """None: it is to be asked again, now. Raises Unavailable when it is too late for that."""
        changed = self._changed
        try:
            return await self._schedule(request)
        except Unavailable:
            if asyncio.get_running_loop().time() >= give_up_at:
                raise
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PAUSE_S):
                await changed.wait()
        return None

    async def cluster(self) -> ClusterStatus:
        """Raises Unavailable."""
        peer = await self._whom_to_ask()
        status = await self._or_lost(peer, peer.cluster())
        if self._lease is not None and not status.leads:
            self._note(self._leader.hinted(peer.address, status.leader_address, status.epoch))
            raise _nobody_leads()
        return status

    async def observe(self, observe: Observe) -> AsyncGenerator[ObservedPart, None]:
        """What the one that is asked shows of the cluster, the Overview first. Raises Unavailable."""
        peer = await self._whom_to_ask()
        async with contextlib.aclosing(peer.observe(observe)) as parts:
            async for part in parts:
                yield part

    async def explain(self, explain: Explain) -> Explanation:
        """Raises Unavailable."""
        return await (await self._whom_to_ask()).explain(explain)

    def report(self, report: AttemptReport) -> None:
        """Sends a report to every Conductor, in order, in the background."""
        for peer in self._peers.values():
            peer.report(report)

    # ---- asking ----

    async def _schedule(self, request: Schedule) -> ScheduleReply:
        peer = await self._whom_to_ask()
        if self._lease is None:
            return await self._or_lost(peer, peer.schedule(request))
        request = replace(request, epoch=self._leader.epoch)
        reply = await self._or_lost(peer, _unless(self._changed, peer.schedule(request)))
        if reply.not_leader is not None:
            self._note(self._leader.hinted(peer.address, reply.not_leader.leader_address, reply.not_leader.epoch))
            raise _nobody_leads()
        if not self._leader.accepts(reply.epoch):
            metrics.STALE_ANSWERS.inc()
            message = f"the Conductor at {peer.address} answered under epoch {reply.epoch}, but {self._leader.epoch} has begun"
            logger.warning("%s: its answer is refused", message)
            self._leader.lost(peer.address)
            raise Unavailable(message, code="no_conductor")
        self._note(self._leader.answered(peer.address, reply.epoch))
        if reply.assignment is not None:
            self._tell_standbys(peer, placed(request, reply.assignment))
        return reply

    async def _whom_to_ask(self) -> ConductorPeer:
        """The leader; while it is not known or in doubt, each of several in turn, for one may know. Raises Unavailable if there is none."""
        leader = self._leader
        if leader.address is None or (leader.doubted and self._lease is None):
            await self._find()
        if leader.address is not None and not (leader.doubted and self._lease is not None):
            return self._peer(leader.address)
        if not self._peers:
            raise Unavailable("no Conductor has announced itself", code="no_conductor")
        addresses = list(self._peers)
        return self._peers[addresses[next(self._turns) % len(addresses)]]

    async def _or_lost(self, peer: ConductorPeer, call: Coroutine[Any, Any, ReplyT]) -> ReplyT:
        try:
            reply = await call
        except Unavailable:
            self._leader.lost(peer.address)
            raise
        if self._lease is None:  # whoever answers is the only one
            self._leader.answered(peer.address, epoch=0)
        return reply

    def _tell_standbys(self, leader: ConductorPeer, placed: LiveAttempt) -> None:
        for peer in self._peers.values():
            if peer is not leader:
                peer.report(placed)

    # ---- who there is ----

    async def _follow_members(self) -> None:
        while True:
            await self._find()
            await asyncio.sleep(RENEW_EVERY_S)

    async def _follow_lease(self, lease: LeaderLease) -> None:
        while True:
            holder = await lease.read()
            if holder is not None:
                self._note(self._leader.read(holder.address, holder.epoch))
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _find(self) -> None:
        """Nobody is forgotten while membership cannot be read or lists no Conductor; and whose address was given is not looked for."""
        if self._fixed is not None:
            return
        members = await self._membership.members()
        addresses = [member.address for member in members or [] if member.role == "conductor"]
        if not addresses:
            return
        if self._lease is None:
            addresses = addresses[:1]
            self._note(self._leader.read(addresses[0], epoch=0))
        self._follow_exactly(addresses)

    def _follow_exactly(self, addresses: Iterable[str]) -> None:
        wanted = {*addresses, *([self._leader.address] if self._leader.address is not None else [])}
        for address in wanted:
            self._peer(address)
        for address in self._peers.keys() - wanted:
            closing = asyncio.create_task(self._peers.pop(address).retire())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _peer(self, address: str) -> ConductorPeer:
        if address not in self._peers:
            on_orders = functools.partial(self._take_orders, address)
            self._peers[address] = ConductorPeer(address, self._gateway_id, self._live_attempts, on_orders, self._credentials)
        return self._peers[address]

    def _take_orders(self, address: str, orders: GatewayOrders) -> None:
        """A standby may be cut off where the leader is not: it decides nothing."""
        if address == self._leader.address:
            self._on_orders(orders)

    def _note(self, changed: bool) -> None:
        if not changed:
            return
        if self._lease is not None:
            logger.info("the leading Conductor is at %s (epoch %d)", self._leader.address or "an unknown address", self._leader.epoch)
        self._changed.set()
        self._changed = asyncio.Event()


async def _unless(changed: asyncio.Event, call: Coroutine[Any, Any, ReplyT]) -> ReplyT:
    """Raises Unavailable when the leader changes first: who was asked may be stopped, and would be waited for in vain."""
    calling = asyncio.create_task(call)
    await first_of(calling, changed.wait())
    if calling.cancelled():
        raise _nobody_leads()
    return calling.result()


def placed(request: Schedule, assignment: Assignment) -> LiveAttempt:
    """What a Conductor that did not place it is told of a new attempt."""
    return LiveAttempt(
        attempt_id=assignment.attempt_id,
        prefill_id=assignment.prefill.instance_id,
        decode_id=assignment.decode.instance_id,
        phase=Phase.PREFILL,
        num_tokens=request.num_tokens,
        tenant=request.tenant,
        max_new_tokens=request.max_new_tokens,
        prediction=assignment.prediction,
        output_tokens=request.output_tokens,
        successor_of=request.successor_of,
    )


def _nobody_leads() -> Unavailable:
    return Unavailable("no Conductor leads just now", code="no_conductor")


class ConductorPeer:
    """One Conductor: calls, and in the background what it is to know of this gateway's attempts."""

    def __init__(
        self,
        address: str,
        gateway_id: GatewayId,
        live_attempts: Callable[[], Sequence[LiveAttempt]],
        on_orders: Callable[[GatewayOrders], None],
        credentials: Credentials = OPEN,
    ) -> None:
        """Needs a running event loop. `on_orders` is told what it wants done with attempts that run."""
        self.address = address
        self._gateway_id = gateway_id
        self._credentials = credentials
        self._live_attempts = live_attempts
        self._on_orders = on_orders
        self._channel: grpc.aio.Channel | None = None
        self._questions: Questions | None = None
        self._reports: asyncio.Queue[AttemptReport] = asyncio.Queue(MOST_KEPT)
        self._closing: set[asyncio.Task[None]] = set()
        self._reachable = True
        self._tasks = [
            supervised(self._renew, f"conductor-renew-{address}"),
            supervised(self._send_reports, f"conductor-report-{address}"),
            supervised(self._follow_orders, f"conductor-orders-{address}"),
        ]

    async def schedule(self, request: Schedule) -> ScheduleReply:
        """Raises Unavailable when it cannot be asked or does not answer; ValueError when its answer makes no sense."""
        return wire.SCHEDULE_REPLY.decode(await self._told(lambda questions: questions.ask(wire.SCHEDULE.encode(request), CALL_TIMEOUT_S)))

    async def cluster(self) -> ClusterStatus:
        """Raises Unavailable."""
        request = conductor_pb2.GetClusterRequest()
        return wire.CLUSTER_STATUS.decode(await self._ask(lambda stub: stub.GetCluster(request, timeout=CALL_TIMEOUT_S)))

    async def observe(self, observe: Observe) -> AsyncGenerator[ObservedPart, None]:
        """Raises Unavailable."""
        call = ObserverStub(self._connected()).Observe(wire.OBSERVE.encode(observe), timeout=CALL_TIMEOUT_S)
        with self._answered():
            try:
                async for part in call:
                    yield wire.OBSERVED_PART.decode(part)
            finally:
                call.cancel()

    async def explain(self, explain: Explain) -> Explanation:
        """Raises Unavailable."""
        with self._answered():
            return wire.EXPLANATION.decode(
                await ObserverStub(self._connected()).Explain(wire.EXPLAIN.encode(explain), timeout=CALL_TIMEOUT_S)
            )

    def report(self, report: AttemptReport) -> None:
        """Sent in order, in the background, with all that has gathered meanwhile. Lost when the Conductor is away, or too slow for so many:
        what runs and what has ended, the next two renewals teach it; what it would have learnt for its predictions stays lost."""
        if self._reports.full():
            self._lose_one()
        self._reports.put_nowait(report)

    async def close(self, patience_s: float) -> None:
        """Reports what is still to be reported, if it is taken in time, and hangs up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._reports.join()
        await self._hang_up(grace_s=None)

    async def retire(self) -> None:
        """Hangs up on a Conductor that is no more. Calls in flight end by themselves: whoever made them is owed an answer."""
        await self._hang_up(grace_s=_GRACE_S)

    async def _hang_up(self, grace_s: float | None) -> None:
        await end(*self._tasks)
        if self._channel is not None:
            await _closed(self._channel, self._questions, grace_s)

    async def _ask(self, call: Callable[[ConductorStub], Awaitable[ReplyT]]) -> ReplyT:
        channel = self._connected()
        with self._answered(channel):
            reply = await call(ConductorStub(channel))
        self._note_reachable(True)
        return reply

    async def _told(self, tell: Callable[[Questions], Awaitable[ReplyT]]) -> ReplyT:
        """Raises Unavailable."""
        questions = self._asking()
        try:
            reply = await tell(questions)
        except Unanswered as error:
            if error.lost:
                self._note_reachable(False)
                self._abandon(questions.channel)
            raise self._unanswered(str(error)) from None
        self._note_reachable(True)
        return reply

    @contextlib.contextmanager
    def _answered(self, channel: grpc.aio.Channel | None = None) -> Iterator[None]:
        """A call, over a channel that is given up if it is lost. Without one, of who only watches, nobody is taken for lost. Raises
        Unavailable for what the call fails with."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if channel is not None and error.code() in LOST:
                self._note_reachable(False)
                self._abandon(channel)
            raise self._unanswered(error.details()) from None
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            # Its channel was closed: after a pause of this process the grace may be over together with the time for the answer.
            raise self._unanswered("its connection was given up") from None

    def _connected(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = connect(self.address, self._credentials)
        return self._channel

    def _asking(self) -> Questions:
        """Over the channel of now, which is a new one where the last connection has failed."""
        if self._questions is not None and self._questions.failed:
            self._abandon(self._questions.channel)
        channel = self._connected()
        if self._questions is None:
            self._questions = Questions(channel, self._credentials)
        return self._questions

    def _unanswered(self, why: str | None) -> Unavailable:
        return Unavailable(f"the Conductor at {self.address} did not answer: {why}", code="no_conductor")

    def _abandon(self, channel: grpc.aio.Channel) -> None:
        """The next call makes a new channel, which connects at once where an old one waits for its back-off. Calls in flight on this one
        end by themselves."""
        if channel is self._channel:
            self._channel, questions, self._questions = None, self._questions, None
            self._end(_closed(channel, questions, _GRACE_S))

    def _end(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _note_reachable(self, reachable: bool) -> None:
        if reachable != self._reachable:
            self._reachable = reachable
            level, what = (logging.INFO, "back") if reachable else (logging.WARNING, "lost")
            logger.log(level, "the Conductor at %s is %s", self.address, what)

    async def _send_reports(self) -> None:
        while True:
            gathered = [await self._reports.get()]
            while len(gathered) < _MOST_SENT and not self._reports.empty():
                gathered.append(self._reports.get_nowait())
            request = conductor_pb2.AdvanceRequest(gateway_id=self._gateway_id, reports=map(wire.ATTEMPT_REPORT.encode, gathered))
            try:
                await self._advance(request)
            except Unavailable:
                metrics.LOST_REPORTS.inc(len(gathered))
                # Away: the ones behind would each wait as long, only to be as late.
                while not self._reachable and not self._reports.empty():
                    self._lose_one()
            for _ in gathered:
                self._reports.task_done()

    def _lose_one(self) -> None:
        self._reports.get_nowait()
        self._reports.task_done()
        metrics.LOST_REPORTS.inc()

    async def _renew(self) -> None:
        while True:
            renew = Renew(self._gateway_id, tuple(self._live_attempts()))
            with contextlib.suppress(Unavailable):
                await self._renewal(wire.RENEW.encode(renew))
            await asyncio.sleep(RENEW_EVERY_S)

    async def _follow_orders(self) -> None:
        """A push, for it must be quick, and costs the Conductor of many gateways nothing while all is well."""
        while True:
            try:
                request = conductor_pb2.WatchOrdersRequest(gateway_id=self._gateway_id)
                async for orders in ConductorStub(self._connected()).WatchOrders(request):
                    self._on_orders(wire.GATEWAY_ORDERS.decode(orders))
            except grpc.aio.AioRpcError:
                pass  # that it is lost, the renewals find out
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
                # Its channel was given up.
            await asyncio.sleep(_FOLLOW_AGAIN_S)

    async def _advance(self, request: conductor_pb2.AdvanceRequest) -> None:
        await self._told(lambda questions: questions.advance(request, CALL_TIMEOUT_S))

    async def _renewal(self, request: conductor_pb2.RenewRequest) -> None:
        await self._told(lambda questions: questions.renew(request, CALL_TIMEOUT_S))


async def _closed(channel: grpc.aio.Channel, questions: Questions | None, grace_s: float | None) -> None:
    """Calls that wait for an answer have so long for it."""
    if questions is not None:
        await questions.close(grace_s or 0.0)
    await channel.close(grace=grace_s)


def _is_cancelled() -> bool:
    """Whether it is this task that was cancelled, and not the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())
