"""A cluster as the gateway sees it: a Conductor and nodes with the true wire contract on real sockets, whose model recites a script."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from springtide.blocks import KEY_BYTES
from springtide.config import ClusterConfig, ConductorConfig, KVConfig, ServerConfig
from springtide.credentials import OPEN
from springtide.ids import AttemptId
from springtide.modelinfo import ModelInfo
from springtide.process import ProcessArguments
from springtide.protocol import wire
from springtide.protocol.outputs import PromptLogprobs, SampledToken, TokenLogprob, token_output
from springtide.rpc import common_pb2 as pb
from springtide.rpc import conductor_pb2, conductor_pb2_grpc, node_pb2, node_pb2_grpc
from springtide.rpc.channels import new_server
from springtide.rpc.frames import Frames
from springtide.rpc.questions import AskedServicer

MODEL = "demo-model"
EOS = 2
BLOCK_TOKENS = 64
WAIT_S = 10.0
SIGNS_EVERY_S = 0.2

Start = node_pb2.PrefillStart | node_pb2.DecodeStart


def new_arguments(model_info: ModelInfo, valkey_url: str, run_dir: Path) -> ProcessArguments:
    config = ClusterConfig(
        model="demo",
        served_model_name=MODEL,
        max_context=2000,
        redis_url=valkey_url,
        # What one test leaves in Valkey is nothing to another's gateway.
        cluster=f"test-{secrets.token_hex(4)}",
        kv=KVConfig(open_to_strangers=True),
        server=ServerConfig(port=0, grpc_port=0),
        conductor=ConductorConfig(max_attempts=3),
    )
    return ProcessArguments(config, model_info, run_dir, node_id="", instance_id="gateway-0", bind_host="127.0.0.1")


class Cluster:
    """`script` gives the output of an attempt, from output position 0; after it comes the end-of-sequence token."""

    def __init__(self) -> None:
        self.script: Callable[[Start], Sequence[int]] = lambda start: ()
        self.logprob: Callable[[Start], float] = lambda start: -0.5
        """Of each token of an attempt's output."""
        self.cached_tokens = 0
        self.started: list[tuple[str, Start]] = []
        self.aborted: list[tuple[str, str]] = []
        self.handed_over: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.conductor = FakeConductor(self)
        self.nodes: dict[str, FakeNode] = {}
        for name in ("prefill-0", "prefill-1"):
            self.nodes[name] = FakePrefillNode(self, name)
        for name in ("decode-0", "decode-1"):
            self.nodes[name] = FakeDecodeNode(self, name)

    async def start(self) -> None:
        await self.conductor.start()
        for node in self.nodes.values():
            await node.start()

    async def close(self) -> None:
        await self.conductor.stop()
        for node in self.nodes.values():
            await node.stop()

    def sampled(self, start: Start, position: int) -> pb.TokenOutput:
        """What the model says at an output position."""
        script = self.script(start)
        token_id = script[position] if position < len(script) else EOS
        params = wire.SAMPLING_PARAMS.decode(start.request.params)
        token = SampledToken(token_id)
        if params.logprobs is not None:
            logprob = self.logprob(start)
            top = tuple(TokenLogprob(token_id + rank, logprob - rank) for rank in range(params.logprobs))
            token = SampledToken(token_id, logprob, top)
        return wire.TOKEN_OUTPUT.encode(token_output(AttemptId(start.request.attempt_id), (token,), position, params, (EOS,)))

    def scores(self, start: Start) -> PromptLogprobs | None:
        """What the model says of the prompt, where it is asked: its token i has a log-probability of -i / 8 and is third, the likeliest are
        those after it in the vocabulary."""
        params = wire.SAMPLING_PARAMS.decode(start.request.params)
        prompt = np.array(start.request.token_ids, "<i4")
        if params.prompt_logprobs is None or len(prompt) > start.request.num_prompt_tokens:
            return None
        own = -np.arange(1, len(prompt), dtype="<f4") / 8
        ahead = np.arange(params.prompt_logprobs, dtype="<i4")
        top_ids, tops = prompt[1:, None] + 1 + ahead, np.broadcast_to(-ahead.astype("<f4") / 16, (len(own), len(ahead)))
        return PromptLogprobs(own.tobytes(), np.full(len(own), 3, "<i4").tobytes(), top_ids.tobytes(), tops.tobytes())

    def attempts_on(self, name: str) -> list[str]:
        return [start.request.attempt_id for at, start in self.started if at == name]

    @property
    def idle(self) -> bool:
        """No node works for anybody."""
        return not any(node.running for node in self.nodes.values())


@asynccontextmanager
async def serving(conductor: AskedServicer) -> AsyncIterator[str]:
    """Serves it for as long as the context lasts, at this address."""
    server = new_server()
    conductor_pb2_grpc.add_ConductorServicer_to_server(conductor, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await conductor.listen("127.0.0.1")
    await server.start()
    try:
        yield address
    finally:
        await conductor.hang_up()
        await server.stop(None)


class FakeConductor(AskedServicer):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(OPEN)
        self._cluster = cluster
        self._server = new_server()
        self.address = ""
        self.ready = True
        self.rejections: list[conductor_pb2.Rejection] = []
        """Answers of the next requests, in order."""
        self.requests: list[conductor_pb2.ScheduleRequest] = []
        self.advances: list[conductor_pb2.Progress] = []
        self.renewals: list[conductor_pb2.RenewRequest] = []
        self._hung: list[conductor_pb2.InstanceRef] = []
        self._hung_changed = asyncio.Event()

    def says_hung(self, *names: str) -> None:
        """All that hang from now on."""
        self._hung = [self._ref(name) for name in names]
        self._hung_changed.set()

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self._server = new_server()
        await self.listen("127.0.0.1")
        conductor_pb2_grpc.add_ConductorServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(address)}"
        await self._server.start()

    async def stop(self) -> None:
        await self.hang_up()
        await self._server.stop(None)

    def phases(self, attempt_id: str) -> list[int]:
        return [advance.phase for advance in self.advances if advance.attempt_id == attempt_id]

    def answer(self, connection: Frames, question: conductor_pb2.ScheduleQuestion) -> None:
        answer = conductor_pb2.ScheduleAnswer(number=question.number)
        match question.WhichOneof("question"):
            case "request":
                answer.reply.CopyFrom(self._placed(question.request))
            case "advance":
                self.advances += [report.progress for report in question.advance.reports]
                answer.advanced.SetInParent()
            case "renew":
                self.renewals.append(question.renew)
                answer.renewed.SetInParent()
        connection.send(answer.SerializeToString())

    def _placed(self, request: conductor_pb2.ScheduleRequest) -> conductor_pb2.ScheduleReply:
        self.requests.append(request)
        assert len(request.block_keys) == request.num_tokens // BLOCK_TOKENS * KEY_BYTES
        if self.rejections:
            return conductor_pb2.ScheduleReply(rejection=self.rejections.pop(0))
        assignment = conductor_pb2.Assignment(
            attempt_id=request.attempt_id,
            predicted_ttft_ms=5,
            ttft_slo_ms=1000,
            tbt_slo_ms=100,
            refusable=not request.accepted,
        )
        assignment.prefill.CopyFrom(self._pick("prefill", request.avoid))
        assignment.decode.CopyFrom(self._pick("decode", request.avoid))
        return conductor_pb2.ScheduleReply(assignment=assignment)

    def _pick(self, role: str, avoid: Sequence[str]) -> conductor_pb2.InstanceRef:
        names = [name for name in self._cluster.nodes if name.startswith(role)]
        name = next((name for name in names if name not in avoid), names[0])
        return self._ref(name)

    def _ref(self, name: str) -> conductor_pb2.InstanceRef:
        role = pb.ROLE_PREFILL if name.startswith("prefill") else pb.ROLE_DECODE
        return conductor_pb2.InstanceRef(
            instance_id=name, role=role, address=self._cluster.nodes[name].address, node_id=f"node-{name}", store_address=f"store-of-{name}"
        )

    async def WatchOrders(self, request: conductor_pb2.WatchOrdersRequest, context: Any) -> AsyncIterator[conductor_pb2.GatewayOrders]:
        while True:
            yield conductor_pb2.GatewayOrders(hung=self._hung)
            await self._hung_changed.wait()
            self._hung_changed.clear()

    async def GetCluster(self, request: conductor_pb2.GetClusterRequest, context: Any) -> conductor_pb2.ClusterStatus:
        return conductor_pb2.ClusterStatus(ready=self.ready)


class FakeNode:
    """Runs attempts as tasks; an abort or the end of their session ends them."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.address = ""
        self.running: dict[str, asyncio.Task[None]] = {}
        self.failure: pb.Failure | None = None
        """How every attempt fails from now on."""
        self.patience = asyncio.Event()
        """Unset: attempts stop where `pause_at` says until it is set."""
        self.pause_at: int | None = None
        self.silent = False
        """It takes commands and says nothing, of its attempts either."""
        self._cluster = cluster
        self._server = new_server()

    async def start(self) -> None:
        self._server = new_server()
        self._add_to(self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        """As if killed: every connection ends at once."""
        await self._server.stop(None)

    def _add_to(self, server: Any) -> None:
        raise NotImplementedError

    async def _run(self, start: Any, out: asyncio.Queue[Any]) -> None:
        raise NotImplementedError

    def _signs(self, signs: node_pb2.AttemptSigns) -> Any:
        raise NotImplementedError

    async def Session(self, commands: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        out: asyncio.Queue[Any] = asyncio.Queue()
        mine: set[str] = set()
        reader = asyncio.create_task(self._read(commands, out, mine))
        try:
            while True:
                try:
                    async with asyncio.timeout(SIGNS_EVERY_S):
                        update = await out.get()
                except TimeoutError:
                    alive = [node_pb2.AttemptSign(attempt_id=attempt_id, waiting=True) for attempt_id in sorted(mine & self.running.keys())]
                    update = self._signs(node_pb2.AttemptSigns(signs=alive))
                if not self.silent:
                    yield update
        finally:
            reader.cancel()
            for attempt_id in mine:
                self._abort(attempt_id)

    async def _read(self, commands: AsyncIterator[Any], out: asyncio.Queue[Any], mine: set[str]) -> None:
        async for command in commands:
            if command.HasField("abort"):
                self._cluster.aborted.append((self.name, command.abort.attempt_id))
                self._abort(command.abort.attempt_id)
                continue
            attempt_id = command.start.request.attempt_id
            self._cluster.started.append((self.name, command.start))
            mine.add(attempt_id)
            task = self.running[attempt_id] = asyncio.create_task(self._run(command.start, out))
            task.add_done_callback(lambda _, attempt_id=attempt_id: self.running.pop(attempt_id, None))

    def _abort(self, attempt_id: str) -> None:
        if (task := self.running.get(attempt_id)) is not None:
            task.cancel()

    async def _pause(self, position: int) -> None:
        if self.pause_at is not None and position >= self.pause_at:
            await self.patience.wait()


class FakePrefillNode(FakeNode, node_pb2_grpc.PrefillNodeServicer):
    def _add_to(self, server: Any) -> None:
        node_pb2_grpc.add_PrefillNodeServicer_to_server(self, server)

    def _signs(self, signs: node_pb2.AttemptSigns) -> node_pb2.PrefillUpdate:
        return node_pb2.PrefillUpdate(signs=signs)

    async def _run(self, start: node_pb2.PrefillStart, out: asyncio.Queue[node_pb2.PrefillUpdate]) -> None:
        if self.failure is not None:
            failed = pb.AttemptFailed(attempt_id=start.request.attempt_id, failure=self.failure)
            out.put_nowait(node_pb2.PrefillUpdate(failed=failed))
            return
        position = len(start.request.token_ids) - start.request.num_prompt_tokens
        await self._pause(position)
        output = self._cluster.sampled(start, position)
        done = node_pb2.PrefillDone(output=output, cached_tokens=self._cluster.cached_tokens)
        if (scores := self._cluster.scores(start)) is not None:
            done.prompt_logprobs.CopyFrom(wire.PROMPT_LOGPROBS.encode(scores))
        out.put_nowait(node_pb2.PrefillUpdate(done=done))
        self._cluster.handed_over[start.request.attempt_id].set()


class FakeDecodeNode(FakeNode, node_pb2_grpc.DecodeNodeServicer):
    def _add_to(self, server: Any) -> None:
        node_pb2_grpc.add_DecodeNodeServicer_to_server(self, server)

    def _signs(self, signs: node_pb2.AttemptSigns) -> node_pb2.DecodeUpdate:
        return node_pb2.DecodeUpdate(signs=signs)

    async def _run(self, start: node_pb2.DecodeStart, out: asyncio.Queue[node_pb2.DecodeUpdate]) -> None:
        if self.failure is not None:
            failed = pb.AttemptFailed(attempt_id=start.request.attempt_id, failure=self.failure)
            out.put_nowait(node_pb2.DecodeUpdate(failed=[failed]))
            return
        await self._cluster.handed_over[start.request.attempt_id].wait()
        position = len(start.request.token_ids) - start.request.num_prompt_tokens
        output = self._cluster.sampled(start, position)
        while output.finish == pb.FINISH_REASON_UNSPECIFIED:
            position += 1
            await self._pause(position)
            output = self._cluster.sampled(start, position)
            out.put_nowait(node_pb2.DecodeUpdate(outputs=[output]))
            await asyncio.sleep(0)
