"""The process of a stage other than the first. It is started and ended by the group's engine process (prefill_node/server/stages.py), or,
on a node of its own, by whoever runs that; then it makes itself known to the cluster, where the engine finds it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import torch

from engine.runner import ModelRunner
from engine.sampling.grammars import Grammars
from engine.sampling.sampler import Sampler
from messenger.registry import TransportSite, choose_transports, make_transport, transport_options_of
from node_runtime.loading import load_runner
from node_runtime.model_thread import ModelThread, default_threads
from prefill_node.core.in_flight import most_passes
from prefill_node.stage.ring import RING_SHM, RingShape, RingTransports, shared_on
from prefill_node.stage.session import StageSession
from springtide.config import ClusterConfig
from springtide.credentials import credentials_of
from springtide.errors import ConfigError, SpringtideError
from springtide.ids import new_incarnation
from springtide.membership import Member, Membership
from springtide.process import ProcessArguments, end_process
from springtide.protocol.instances import Role
from springtide.protocol.stages import JoinGroup
from springtide.protocol.wire import LOAD_LAYERS, STAGE_ORDER
from springtide.rpc import channels, stage_pb2, stage_pb2_grpc
from springtide.telemetry import serve_metrics

logger = logging.getLogger(__name__)

STOP_GRACE_S = 0.5


def stage_socket(run_dir: Path, stage_id: str) -> Path:
    """The Unix socket where the stage serves gRPC."""
    return run_dir / f"{stage_id}.sock"


def ring_socket(run_dir: Path, stage_id: str) -> Path:
    """The Unix socket where the stage before gets at its buffers."""
    return run_dir / f"{stage_id}.ring.sock"


def ring_shape(config: ClusterConfig, runner: ModelRunner) -> RingShape:
    """The shape of every ring of the group."""
    settings = config.prefill_node
    return RingShape(most_passes(settings.stages), settings.chunk_tokens, runner.model.config.hidden_size, runner.model.dtype)


def ring_transports(arguments: ProcessArguments, socket: Path) -> RingTransports:
    """Shared memory at the socket between stages of one node; between nodes the transports that their stores have. Raises ConfigError."""
    config = arguments.config
    if not config.prefill_node.spread_stages:
        return shared_on(socket)
    options = replace(transport_options_of(config), shm=RING_SHM)
    names, _ = choose_transports(config.kv.transports, options)
    return lambda memory: [make_transport(name, TransportSite(memory, arguments.bind_host, socket), options) for name in names]


async def serve(arguments: ProcessArguments, stop: asyncio.Event) -> None:
    """Serves the stage until `stop`."""
    config = arguments.config
    thread = ModelThread(config.prefill_node.threads or default_threads(config.num_engines))
    stage = StageServer(arguments, thread)
    try:
        await (_serve_cluster if config.prefill_node.spread_stages else _serve_node)(arguments, stage, stop)
    finally:
        await stage.close()
        await thread.close()


async def _serve_node(arguments: ProcessArguments, stage: StageServer, stop: asyncio.Event) -> None:
    """Serves the engine that has started it, over a Unix socket in the run directory, which is this user's alone."""
    server = channels.new_server()
    stage_pb2_grpc.add_PrefillStageServicer_to_server(stage, server)
    socket = stage_socket(arguments.run_dir, arguments.instance_id)
    socket.unlink(missing_ok=True)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        await stop.wait()
    finally:
        await server.stop(STOP_GRACE_S)


async def _serve_cluster(arguments: ProcessArguments, stage: StageServer, stop: asyncio.Event) -> None:
    """Serves the group's engine, on another node, which finds it in the membership."""
    config, credentials = arguments.config, credentials_of(arguments.config)
    if config.redis_url is None:
        raise ConfigError("redis_url: the stages of a group over several nodes are found there, and there is none")
    server = channels.new_server(credentials)
    stage_pb2_grpc.add_PrefillStageServicer_to_server(stage, server)
    address = channels.listen(server, f"{arguments.bind_host}:0", credentials)
    await server.start()
    membership = Membership.of(config, credentials)
    try:
        await membership.announce(
            Member(
                role="stage",
                member_id=arguments.instance_id,
                incarnation=new_incarnation(),
                address=address,
                node_id=arguments.node_id,
                metrics_address=serve_metrics(credentials, arguments.bind_host, arguments.metrics_port),
                pid=os.getpid(),
            )
        )
        await stop.wait()
    finally:
        await membership.close()
        await server.stop(STOP_GRACE_S)


class StageServer(stage_pb2_grpc.PrefillStageServicer):
    """The service of a stage: its layers are loaded once, then session follows session."""

    def __init__(self, arguments: ProcessArguments, thread: ModelThread) -> None:
        self._arguments = arguments
        self._thread = thread
        self._grammars = Grammars(arguments.model_info)
        self._sampler = Sampler(arguments.model_info, self._grammars)
        self._refused = ""
        """Why it last did not take the layers that it was given."""
        self._loading: asyncio.Future[ModelRunner] | None = None
        self._turn = asyncio.Lock()
        self._buffers: torch.Tensor | None = None
        """The ring's buffers on the device, for all sessions: torch lets go of shared memory only when whoever opened it has said that it
        is done, which the stage before cannot where it is killed."""

    async def close(self) -> None:
        if (runner := self._runner) is not None:
            await self._thread.run(runner.close)

    @property
    def _runner(self) -> ModelRunner | None:
        """The runner, once it is loaded."""
        loading = self._loading
        return loading.result() if loading is not None and loading.done() and loading.exception() is None else None

    async def Load(self, request: stage_pb2.LoadLayers, context: Any) -> stage_pb2.LoadLayersReply:
        order = LOAD_LAYERS.decode(request)
        layers = (order.layer_begin, order.layer_end)
        if order.stages != (own := self._arguments.config.prefill_node.stages):
            why = (
                f"--stage: {self._arguments.instance_id} was started as {self._arguments.stage}/{own}, and its group's first stage as "
                f"0/{order.stages}: all of a group are to be started with the same number of stages"
            )
            if why != self._refused:  # it will be asked again
                self._refused = why
                logger.error("%s", why)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        async with self._turn:
            if self._loading is None or (self._loading.done() and self._runner is None):
                if order.layer_end == self._arguments.model_info.layers:
                    self._grammars.load()
                self._loading = self._thread.run(load_runner, self._arguments, Role.PREFILL, layers)
            # Whoever asked may be gone before it has loaded, and the next one finds it loaded.
            runner = await asyncio.shield(self._loading)
            assert (runner.model.begin, runner.model.end) == layers, "a group keeps its split"
        return stage_pb2.LoadLayersReply()

    async def Serve(self, request_iterator: AsyncIterator[stage_pb2.StageOrder], context: Any) -> None:
        first = await anext(aiter(request_iterator), None)
        join, runner = STAGE_ORDER.decode(first) if first is not None else None, self._runner
        if not isinstance(join, JoinGroup) or runner is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a stage's first order is JoinGroup, once it has loaded its layers")
            return
        async with self._turn:
            arguments, shape = self._arguments, ring_shape(self._arguments.config, runner)
            alone = arguments.config.prefill_node.spread_stages
            if self._buffers is None and not alone:
                self._buffers = _buffers_on(runner.activations_device, shape)
            session = StageSession(
                join=join,
                runner=runner,
                sampler=self._sampler,
                grammars=self._grammars,
                thread=self._thread,
                shape=shape,
                name=arguments.instance_id,
                arena_socket=arguments.arena_socket,
                transports=ring_transports(arguments, ring_socket(arguments.run_dir, arguments.instance_id)),
                buffers=self._buffers,
                prefix_timeout_s=arguments.config.kv.lease_s,
                on_hang=end_process if alone else None,
            )
            try:
                await session.run(request_iterator, context.write)
            except (SpringtideError, OSError) as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))


def _buffers_on(device: torch.device | None, shape: RingShape) -> torch.Tensor | None:
    try:
        return shape.on(device) if device is not None else None
    except RuntimeError as error:
        logger.warning("no room for activations on %s, so they go through the host's memory: %s", device, error)
        return None
