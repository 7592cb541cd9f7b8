"""Prefill and decode nodes for tests: real stores, engines and gRPC sessions in the test's own event loop, and a gateway to drive them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc.aio
import numpy as np

import mixed_node.server.starting as mixed
import prefill_node.server.starting as prefill
from engine.batch import SamplingRow, SequenceChunk
from engine.formats.files import describe
from engine.loader import load_model
from engine.runner import ModelRunner
from engine.sampling.sampler import sample
from kvstore.server.process import options_of
from kvstore.server.store import MakeTransport, Store
from springtide.blocks import block_keys, namespace_root, packed
from springtide.config import load_config
from springtide.ids import new_id
from springtide.membership import Member, Membership
from springtide.process import ProcessArguments
from springtide.protocol import wire
from springtide.protocol.outputs import AttemptFailed, Failure, Finish, PrefillDone, TokenOutput
from springtide.protocol.sampling import SamplingParams
from springtide.rpc import channels, node_pb2
from springtide.rpc.node_pb2_grpc import DecodeNodeStub, PrefillNodeStub
from tests.support.profiles import TINY_PROFILE
from tests.support.valkey import new_valkey
from tests.support.waiting import until

WAIT_S = 60.0
EOS = 2


class EngineNodes:
    """`async with EngineNodes(run_dir, model, decode=1, kv={...}) as nodes`: ready when entered, gone when left. float32. What the
    model costs is not measured."""

    def __init__(self, run_dir: Path, model: Path, make_transport: MakeTransport | None = None, **settings: Any) -> None:
        """`make_transport` makes the transports of every store. Raises ValueError where several engines would be tensor parallel."""
        split = {} if "instances" in settings else {"prefill": 1, "decode": 1}
        settings = {"model": str(model), "dtype": "float32", "device": "cpu", "profile": TINY_PROFILE, **split, **settings}
        self.info = describe(settings["model"])
        kinds = (("prefill", "prefill_node"), ("decode", "decode_node"), ("instances", "decode_node"))
        parallel = [settings.get(count, 0) for count, section in kinds if settings.get(section, {}).get("tensor_parallel", 1) > 1]
        if sum(parallel) > 1:
            raise ValueError(f"a process is in one group of ranks: {sum(parallel)} tensor parallel engines need processes of their own")
        self._run_dir = run_dir
        self._make_transport = make_transport
        self._valkey = new_valkey()
        self._settings = settings
        self.stores: dict[str, Store] = {}
        self._stops: dict[str, asyncio.Event] = {}
        self._engines: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> EngineNodes:
        self._valkey.start()
        flat = {
            f"{section}.{key}": v for section, values in self._settings.items() if isinstance(values, dict) for key, v in values.items()
        }
        plain = {key: value for key, value in self._settings.items() if not isinstance(value, dict)}
        self.config = load_config(
            overrides={**plain, **flat, "kv.open_to_strangers": True, "redis_url": f"redis://127.0.0.1:{self._valkey.port}"}, environ={}
        )
        self._membership = Membership(self.config.redis_url or "", self.config.cluster, 5.0)
        counts = {"prefill": self.config.prefill, "decode": self.config.decode, "instance": self.config.instances}
        nodes = [f"{kind}-{i}" for kind, count in counts.items() for i in range(count)]
        for name in nodes:
            await self.start_store(name)
            self._start_engine(name)
        both = [f"{name}.prefill" for name in nodes if name.startswith("instance")]
        self.members = {name: await self.member(name) for name in (*nodes, *both)}
        self.gateway = Gateway(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if hasattr(self, "gateway"):
            await self.gateway.close()
        for stop in self._stops.values():
            stop.set()
        await asyncio.gather(*self._engines)
        for store in self.stores.values():
            await store.close()
        await self._membership.close()
        self._valkey.stop()

    def arguments(self, node_id: str) -> ProcessArguments:
        prefills = node_id.startswith("instance")
        return ProcessArguments(self.config, self.info, self._run_dir, node_id, node_id, "127.0.0.1", prefills=prefills)

    async def start_store(self, node_id: str) -> None:
        self.stores[node_id] = Store(options_of(self.arguments(node_id)), self._make_transport)
        await self.stores[node_id].start()

    async def member(self, member_id: str, other_than: int = 0) -> Member:
        """Waits until it has announced itself, with another incarnation than the one given."""
        async with asyncio.timeout(WAIT_S):
            while True:
                assert not any(engine.done() for engine in self._engines), "an engine has ended"
                for member in await self._membership.members() or ():
                    if member.member_id == member_id and member.incarnation != other_than:
                        return member
                await asyncio.sleep(0.02)

    async def all_slots_given_back(self) -> None:
        """Waits until no store has a slot in use or quarantined."""
        await until(
            lambda: all(counts.in_use == counts.quarantined == 0 for counts in (store.pool.counts() for store in self.stores.values()))
        )
        for store in self.stores.values():
            store.pool.validate()

    def stop_engine(self, name: str) -> None:
        """Orders it to stop at once, whatever it has."""
        self._stops[name].set()

    def _start_engine(self, name: str) -> None:
        arguments, stop = self.arguments(name), asyncio.Event()
        serve = prefill.serve if name.startswith("prefill") else mixed.serve
        self._stops[name] = stop
        self._engines.append(asyncio.create_task(serve(arguments, stop), name=name))


@dataclass
class Outcome:
    """What a gateway has heard of an attempt."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the tokens, when asked for."""
    done: PrefillDone | None = None
    finish: Finish | None = None
    failures: list[Failure] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, output: TokenOutput) -> None:
        self.token_ids += [token.token_id for token in output.tokens]
        self.logprobs += [token.logprob for token in output.tokens if token.logprob is not None]
        self.finish = self.finish or output.finish
        self.changed.set()

    def fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.changed.set()

    @property
    def ended(self) -> bool:
        return bool(self.finish or self.failures)


class Session:
    """One session with one instance."""

    def __init__(self, stub: Any, on_update: Callable[[Any], None]) -> None:
        self._call = stub.Session()
        self._writing = asyncio.Lock()
        self._reading = asyncio.create_task(self._read(on_update))

    async def send(self, command: node_pb2.PrefillCommand | node_pb2.DecodeCommand) -> None:
        async with self._writing:
            await self._call.write(command)

    async def _read(self, on_update: Callable[[Any], None]) -> None:
        while (update := await self._call.read()) is not grpc.aio.EOF:
            on_update(update)

    async def over(self) -> None:
        """Waits until the instance has ended it."""
        await asyncio.wait({self._reading})

    async def close(self) -> None:
        self._reading.cancel()
        self._call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


class Gateway:
    """Starts attempts on both sides at once and collects what comes back; outputs of a position are taken in order."""

    def __init__(self, nodes: EngineNodes) -> None:
        self._nodes = nodes
        self._channels: dict[str, grpc.aio.Channel] = {}
        """By address."""
        self._sessions: dict[str, Session] = {}
        self.outcomes: defaultdict[str, Outcome] = defaultdict(Outcome)
        self._waiting: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        """How the prefill of attempts begins that wait for room at their decode node."""
        self._beginning: set[asyncio.Task[None]] = set()
        spec = nodes.info.kv_spec(nodes.config.dtype, nodes.config.kv.block_tokens)
        self._namespace = namespace_root(nodes.info.fingerprint, spec.dtype, spec.block_tokens)

    def stub(self, instance_id: str) -> Any:
        member = self._nodes.members[instance_id]
        if member.address not in self._channels:
            self._channels[member.address] = channels.connect(member.address)
        channel = self._channels[member.address]
        return PrefillNodeStub(channel) if member.role == "prefill" else DecodeNodeStub(channel)

    def session(self, instance_id: str) -> Session:
        if instance_id not in self._sessions:
            self._sessions[instance_id] = Session(self.stub(instance_id), self._take)
        return self._sessions[instance_id]

    async def end_session(self, instance_id: str) -> None:
        await self._sessions.pop(instance_id).close()

    async def close(self) -> None:
        for instance_id in list(self._sessions):
            await self.end_session(instance_id)
        for channel in self._channels.values():
            await channel.close()

    def _take(self, message: node_pb2.PrefillUpdate | node_pb2.DecodeUpdate) -> None:
        if isinstance(message, node_pb2.DecodeUpdate):
            update = wire.DECODE_UPDATE.decode(message)
            for done in update.prefilled:
                self._take_done(done)
            for output in update.outputs:
                self.outcomes[output.attempt_id].take(output)
            for failed in update.failed:
                self.outcomes[failed.attempt_id].fail(failed.failure)
            for attempt_id in update.reserved:
                if (begin := self._waiting.pop(attempt_id, None)) is not None:
                    self._beginning.add(asyncio.create_task(begin()))
            return
        match wire.PREFILL_UPDATE.decode(message):
            case PrefillDone() as done:
                self._take_done(done)
            case AttemptFailed(attempt_id, failure):
                self.outcomes[attempt_id].fail(failure)

    def _take_done(self, done: PrefillDone) -> None:
        self.outcomes[done.output.attempt_id].done = done
        self.outcomes[done.output.attempt_id].take(done.output)

    async def start(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        num_prompt_tokens: int | None = None,
        on: tuple[str, str] = ("prefill-0", "decode-0"),
        source: str | None = None,
        tbt_slo_ms: float = 0.0,
        inlined: bool = False,
        waits: bool = False,
        idle: bool = False,
        refusable: bool = True,
        foretold: Sequence[int] = (),
    ) -> str:
        """Returns the attempt's id. `source`: the node whose store holds more of the prefix. `inlined`: the decode node computes the
        prompt. `waits`: the decode node is asked first, and prefill begins when it has room. `refusable`: for its objective. `foretold`: of
        its output, said at once."""
        prefill_id, decode_id = on
        attempt_id = new_id("attempt")
        members = self._nodes.members
        block_tokens = self._nodes.config.kv.block_tokens
        request = node_pb2.Request(
            request_id="req",
            attempt_id=attempt_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
            params=wire.SAMPLING_PARAMS.encode(params),
            namespace=self._namespace,
            keys=packed(block_keys(self._namespace, token_ids, block_tokens)),
            block_tokens=block_tokens,
            idle=idle,
        )
        decode_start = node_pb2.DecodeStart(request=request, tbt_slo_ms=tbt_slo_ms, inlined=inlined, waits=waits, refusable=refusable)
        source_blocks = len(token_ids) // block_tokens
        if inlined:
            if source is not None:
                address = members[source].details["store_address"]
                decode_start.sources.add(node_id=source, store_address=address, num_blocks=source_blocks)
            await self.session(decode_id).send(node_pb2.DecodeCommand(start=decode_start))
            if foretold:
                position = len(token_ids) - request.num_prompt_tokens
                told = node_pb2.ForetellTokens(attempt_id=attempt_id, position=position, token_ids=foretold)
                await self.session(decode_id).send(node_pb2.DecodeCommand(foretell=told))
            return attempt_id
        prefill_start = node_pb2.PrefillStart(
            request=request,
            decode_store_address=members[decode_id].details["store_address"],
            decode_store_node_id=decode_id,
            ttft_budget_ms=30_000,
        )
        if source is not None:
            address = members[source].details["store_address"]
            prefill_start.sources.add(node_id=source, store_address=address, num_blocks=source_blocks)

        async def begin_prefill() -> None:
            await self.session(prefill_id).send(node_pb2.PrefillCommand(start=prefill_start))

        if waits:
            self._waiting[attempt_id] = begin_prefill
        await self.session(decode_id).send(node_pb2.DecodeCommand(start=decode_start))
        if not waits:
            await begin_prefill()
        return attempt_id

    async def abort(self, attempt_id: str, on: tuple[str, str] = ("prefill-0", "decode-0")) -> None:
        order = node_pb2.AbortAttempt(attempt_id=attempt_id)
        await self.session(on[0]).send(node_pb2.PrefillCommand(abort=order))
        await self.session(on[1]).send(node_pb2.DecodeCommand(abort=order))

    async def end_of(self, attempt_id: str) -> Outcome:
        outcome = self.outcomes[attempt_id]
        async with asyncio.timeout(WAIT_S):
            while not outcome.ended:
                outcome.changed.clear()
                await outcome.changed.wait()
        return outcome

    async def run(self, token_ids: Sequence[int], params: SamplingParams, **options: Any) -> Outcome:
        """To its end; as the gateway does, aborts the decode side when the first token was the last."""
        attempt_id = await self.start(token_ids, params, **options)
        outcome = await self.end_of(attempt_id)
        if outcome.done is not None and outcome.done.output.finish and not options.get("inlined"):
            await self.abort(attempt_id, options.get("on", ("prefill-0", "decode-0")))
        return outcome


class DirectEngine:
    """The same model without any nodes: the whole prompt in one pass, then token by token."""

    def __init__(self, nodes: EngineNodes) -> None:
        spec = nodes.info.kv_spec("float32", nodes.config.kv.block_tokens)
        self._num_slots = 4096 // spec.block_tokens
        arena = np.zeros(self._num_slots * spec.bytes_per_slot, np.uint8)
        self.runner = ModelRunner(load_model(nodes.info, "float32"), spec, arena, self._num_slots)

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """`params.max_tokens` tokens, or fewer when one of them is the end of the sequence, which is left out."""
        slots, output, new, start = range(self._num_slots), list[int](), list(prompt), 0
        while len(output) < params.max_tokens:
            logits = self.runner.forward([SequenceChunk(new, start, slots)])
            (sampled,) = sample(logits, [SamplingRow(params, prompt, output)])
            if sampled.token_id == EOS and not params.ignore_eos:
                break
            output.append(sampled.token_id)
            new, start = [sampled.token_id], start + len(new)
        return output
