"""The gateway as it runs: HTTP and gRPC in front, the Conductor and the nodes behind, until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace

import grpc.aio

from engine.tokenizer.tokenizer import load_tokenizer
from gateway import metrics
from gateway.accounts.accounts import Accounts
from gateway.accounts.usage import Counts, UsageRow
from gateway.answer import ApiBackend
from gateway.background import Background
from gateway.batches.desk import BatchDesk
from gateway.batches.files import Files
from gateway.batches.worker import BatchWorker
from gateway.bodies import Bodies, SideThread
from gateway.caching.catalogue import Budget, Catalogue
from gateway.caching.desk import Desk
from gateway.caching.keeper import Computer, Keeper
from gateway.caching.stores import Stores
from gateway.collector import forgiving_variables
from gateway.conductor_link import ConductorLink
from gateway.console.routes import Console
from gateway.conversation import ChatModel
from gateway.core import GatewayCore
from gateway.events import InstancesHung, MovesWanted
from gateway.genai_metrics import GenAiMetrics
from gateway.grammar_checks import GrammarChecker
from gateway.grpc_service import new_server
from gateway.http_app import create_app
from gateway.http_server import HttpServer, bind
from gateway.objectives import Objectives
from gateway.openai.batches import OpenAIBatches
from gateway.prepare import Preparer
from gateway.runner import Runner
from gateway.state import Limits
from gateway.tenancy import TenantHashing
from gateway.tracing.otlp import Destination, TraceExporter
from gateway.tracing.tracer import Sampling, Tracer
from springtide.capacity import context_tokens, quota_tokens
from springtide.clock import MonotonicClock
from springtide.config import ClusterConfig
from springtide.credentials import credentials_of
from springtide.errors import ConfigError
from springtide.ids import GatewayId, new_incarnation
from springtide.leader_lease import LeaderLease
from springtide.membership import Member, Membership
from springtide.process import ProcessArguments, raise_file_limit
from springtide.protocol.scheduling import GatewayOrders
from springtide.supervision import end, first_of
from springtide.telemetry import serve_metrics
from springtide.tls import Tls, public_tls
from springtide.valkey import ValkeyClient

logger = logging.getLogger(__name__)

_GRACE_S = 0.5
"""For clients to take their last bytes when the gateway stops."""
MAX_HTTP_CONNECTIONS, MAX_HTTP_HANDSHAKES, MAX_GRPC_CONNECTIONS = 8192, 2048, 4096
"""Where the process may open enough files: half of these are for HTTP, an eighth for its handshakes, a quarter for gRPC, the rest for the
cluster's own connections."""
_AFTER_CONDUCTOR_S = 0.5
_SEEN_S = 2.0
"""When a gateway that leaves has had nothing to do for so long, balancers have seen that it is ready no more."""
_LOOK_EVERY_S = 0.05
_VALKEY_TIMEOUT_S = 2.0
TAKE_OVER_S = 1.0
"""By when, after the lease of a leader that died is over, another Conductor leads."""


async def serve_gateway(arguments: ProcessArguments, stop: asyncio.Event, conductor_address: str | None = None) -> None:
    """Serves until `stop` is set, then answers what still runs and returns within two seconds.

    `conductor_address` is given by the process that the gateway shares with the Conductor; without it membership says where that is, and
    the gateway serves metrics on a port of its own. Raises ConfigError when a port cannot be had.
    """
    gateway = GatewayServer(arguments, conductor_address)
    try:
        await gateway.start()
        await gateway.run(stop)
    finally:
        await gateway.close()


class GatewayServer:
    """One gateway, with its two APIs and its ways to the cluster."""

    def __init__(self, arguments: ProcessArguments, conductor_address: str | None = None) -> None:
        config = arguments.config
        assert config.redis_url is not None, "the resolved configuration names Valkey"
        self.http_address = ""
        self.grpc_address = ""
        self._arguments = arguments
        self._standalone = conductor_address is None
        self._incarnation = new_incarnation()
        # A restarted gateway is another one: what it ran before is nobody's.
        self._gateway_id = GatewayId(f"{arguments.instance_id}:{self._incarnation:016x}")
        self._credentials = credentials_of(config)
        self._valkey = ValkeyClient.from_url(config.redis_url, socket_timeout=_VALKEY_TIMEOUT_S, socket_connect_timeout=_VALKEY_TIMEOUT_S)
        self._membership = Membership.of(config, self._credentials)
        self._hashing = TenantHashing(arguments.model_info.fingerprint, config.dtype, config.kv.block_tokens)
        limits = _limits(config)
        objectives = Objectives(config.slo.ttft_ms / 1000, config.slo.tbt_ms / 1000)
        self._traces, self._tracer = _tracing(config, objectives, arguments.instance_id)
        self._core = GatewayCore(limits, self._gateway_id, self._hashing, traces=self._tracer is not None)
        self._conductor = self._new_link(config, config.redis_url, conductor_address)
        self._clock = MonotonicClock()
        model = config.served_model_name or arguments.model_info.name
        self._genai = GenAiMetrics.of(config.metrics, os.environ, model, arguments.instance_id)
        self._runner = Runner(self._core, self._conductor, self._clock, objectives, self._credentials, self._tracer, self._genai)
        self._accounts = Accounts(
            self._valkey,
            config.cluster,
            config.server.api_keys,
            require_api_keys=config.server.require_api_keys,
            max_streams=config.server.max_streams_per_tenant,
            operators=config.server.operators,
        )
        self._side_thread = SideThread()
        self._background = Background()
        self._grammars = GrammarChecker(arguments.model_info)
        self._tls = public_tls(config.server)
        self._catalogue = Catalogue(self._valkey, config.cluster)
        self._stores = Stores(self._membership, self._credentials)
        computer = Computer(self._runner, self._count_context, limits.capacity_wait_s)
        self._keeper = Keeper(self._catalogue, self._stores, computer)
        self._console = Console(self._conductor, self._catalogue.kept, arguments.run_dir / "logs")
        self._desk: Desk | None = None
        self._batches: BatchWorker | None = None
        self._grpc_server: grpc.aio.Server | None = None
        self._http_server: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when both APIs are served. Raises ConfigError when a port cannot be had or the tokenizer cannot be read."""
        server = self._arguments.config.server
        files = raise_file_limit()
        http_socket = bind(server.host, server.port, "server.port")
        try:
            await self._accounts.start()
            backend = await self._backend()
            self._batches = BatchWorker(backend.batches, backend.files, OpenAIBatches(backend), self._side_thread, self._clock)
            grpc_server = self._grpc_server = await new_server(backend, min(files // 4, MAX_GRPC_CONNECTIONS))
            self.grpc_address = f"{server.host}:{_bind_grpc(grpc_server, server.host, server.grpc_port, self._tls)}"
            self.http_address = f"{server.host}:{http_socket.getsockname()[1]}"
            await grpc_server.start()
        except BaseException:
            http_socket.close()
            raise
        max_connections, max_handshakes = min(files // 2, MAX_HTTP_CONNECTIONS), min(files // 8, MAX_HTTP_HANDSHAKES)
        self._http_server = HttpServer(create_app(backend, self._console), max_connections, self._tls, max_handshakes)
        self._serving = asyncio.create_task(self._http_server.serve(sockets=[http_socket]), name="gateway-http")
        self._conductor.start()
        self._runner.start()
        self._keeper.start()
        self._batches.start()
        await self._announce()
        logger.info("gateway serves HTTP on %s and gRPC on %s", self.http_address, self.grpc_address)

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop`; raises when the HTTP server ends before that. Then every request still running gets its terminal reply."""
        assert self._serving is not None and self._http_server is not None and self._grpc_server is not None, "run() comes after start()"
        # The process takes a moment to start, which is nobody's before there is a gateway.
        self._background.start(self._grammars.warm_up(), "starting grammar checks")
        await first_of(asyncio.shield(self._serving), stop.wait())
        if self._serving.done():
            raise RuntimeError("the HTTP server has ended by itself")
        await self._close_batches()
        await self._drain(self._arguments.config.drain_s)
        self._runner.shut_down()
        await self._console.feed.close()
        self._http_server.should_exit = True
        await asyncio.gather(self._serving, self._grpc_server.stop(_GRACE_S), self._background.finish(_GRACE_S))

    async def close(self) -> None:
        """Drops whatever still runs. Idempotent."""
        await end(self._serving)
        if self._grpc_server is not None:
            await self._grpc_server.stop(None)
        if self._desk is not None:
            await self._desk.close()
        await self._console.feed.close()
        await self._keeper.close()
        await self._close_batches()
        self._side_thread.close()
        await self._background.close()
        await self._grammars.close()
        await self._runner.close()
        if self._genai is not None:
            await asyncio.to_thread(self._genai.close)
        if self._tracer is not None and self._traces is not None:
            self._tracer.look(self._clock.now(), linger_s=0.0)
            await asyncio.to_thread(self._traces.close)
        await self._conductor.close()
        await self._accounts.close()
        await self._membership.close()
        await self._valkey.aclose()

    async def _close_batches(self) -> None:
        """Others go on with them."""
        if self._batches is not None:
            await self._batches.close()

    async def _drain(self, drain_s: float) -> None:
        """Is ready no more, which balancers see, sends clients that come again elsewhere, and returns when nothing runs, or there is no
        time left."""
        if drain_s <= 0:
            return
        assert self._http_server is not None and self._grpc_server is not None
        logger.info("is to stop: is ready no more, and ends what it has within %.1f s", drain_s)
        self._runner.leaving = self._http_server.leaving = True
        began = quiet_since = self._clock.now()
        until, seen = began + drain_s, False
        while (now := self._clock.now()) < until and now - quiet_since < min(_SEEN_S, drain_s):
            if self._runner.num_running:
                quiet_since = now
            if now - began >= _SEEN_S and not seen:
                seen = True
                # Over gRPC a connection takes any number of calls: clients are told to have the next ones elsewhere.
                self._background.start(self._grpc_server.stop(until - now), "ending gRPC calls")
            await asyncio.sleep(_LOOK_EVERY_S)

    def _new_link(self, config: ClusterConfig, redis_url: str, address: str | None) -> ConductorLink:
        lease, patience_s = None, 0.0
        if config.several_conductors:
            lease = LeaderLease(redis_url, config.cluster, config.conductor.leader_lease_s, credentials=self._credentials)
            patience_s = config.conductor.leader_lease_s + TAKE_OVER_S
        return ConductorLink(
            self._gateway_id, self._membership, self._core.live_attempts, self._on_orders, address, lease, patience_s, self._credentials
        )

    def _count_context(self, tenant: str, num_tokens: int, cached_tokens: int) -> None:
        """A context was computed by itself."""
        config, info = self._arguments.config, self._arguments.model_info
        row = UsageRow(tenant, "", config.served_model_name or info.name, "context caches", batch=True)
        self._accounts.count(row, Counts(1, num_tokens, cached_tokens, 0))

    def _cache_budget(self, tenant: str, key_id: str) -> Budget:
        tokens = self._accounts.allowance(tenant).cache_tokens or self._arguments.config.server.cache_budget_tokens
        return Budget(tokens, self._accounts.key_allowance(key_id).cache_tokens)

    def _on_orders(self, orders: GatewayOrders) -> None:
        if orders.hung:
            self._runner.post(InstancesHung(frozenset((instance.instance_id, instance.address) for instance in orders.hung)))
        if orders.moves:
            self._runner.post(MovesWanted(orders.moves))

    async def _backend(self) -> ApiBackend:
        config, info = self._arguments.config, self._arguments.model_info
        tokenizer = await asyncio.to_thread(load_tokenizer, info)
        context_length, quotas = context_tokens(config, info), quota_tokens(config, info)
        chat_model = ChatModel(tokenizer, config.server.tool_parser, config.server.reasoning_parser)
        name, block_tokens = config.served_model_name or info.name, config.kv.block_tokens
        defaults = info.default_sampling if config.server.generation_config == "auto" else {}
        preparer = Preparer(name, context_length, info.vocab_size, tokenizer, quotas, chat_model, defaults, block_tokens=block_tokens)
        bodies = Bodies(preparer.bounds.max_body_bytes)
        self._desk = Desk(
            self._catalogue,
            self._keeper,
            self._stores,
            self._side_thread,
            preparer.rendered,
            self._hashing,
            self._cache_budget,
        )
        directory = config.server.files_dir or self._arguments.run_dir / "files"
        files = Files(self._valkey, config.cluster, directory / "files", config.server.max_file_size, config.server.max_tenant_files_size)
        batches = BatchDesk(self._valkey, config.cluster, directory / "batches", files, self._gateway_id, self._clock)
        try:
            await asyncio.to_thread(files.prepare)
        except OSError as error:
            raise ConfigError(f"server.files_dir: {directory} cannot be made: {error.strerror}", param="server.files_dir") from None
        return ApiBackend(
            config.cluster,
            self._valkey,
            config.server,
            files,
            batches,
            preparer,
            tokenizer,
            self._runner,
            self._conductor,
            self._accounts,
            bodies,
            self._side_thread,
            self._clock,
            self._desk,
            self._background,
            self._grammars,
            self._tracer,
        )

    async def _announce(self) -> None:
        member = Member(
            role="gateway",
            member_id=self._arguments.instance_id,
            incarnation=self._incarnation,
            address=self.grpc_address,
            # Beside the Conductor, its metrics address serves this process's registry already.
            metrics_address=self._serve_metrics() if self._standalone else "",
            pid=os.getpid(),
            details={"http": self.http_address, "grpc": self.grpc_address},
        )
        await self._membership.announce(member)

    def _serve_metrics(self) -> str:
        return serve_metrics(self._credentials, self._arguments.bind_host, self._arguments.metrics_port)


def _tracing(config: ClusterConfig, objectives: Objectives, instance_id: str) -> tuple[TraceExporter | None, Tracer | None]:
    """Who sends traces, and who gathers them; nobody where they go nowhere. Raises ConfigError for a setting."""
    with forgiving_variables(config.tracing.endpoint, "nothing is traced"):
        if (destination := Destination.of(config.tracing, os.environ)) is not None:
            exporter = TraceExporter(destination.url, instance_id)
            logger.info("traces go to %s: a share of %g, and all of requests that did not go well", destination.url, destination.ratio)
            return exporter, Tracer(Sampling(destination.ratio, objectives), exporter.put, metrics.TRACES.labels("left_out").inc)
    return None, None


def _limits(config: ClusterConfig) -> Limits:
    # The Conductor, which knows more, comes before.
    limits = Limits(max_attempts=config.conductor.max_attempts, silence_s=config.silence_s + _AFTER_CONDUCTOR_S)
    if config.several_conductors:
        # To wait for the next leader is no sign yet that none will come.
        return replace(limits, scheduler_wait_s=limits.scheduler_wait_s + config.conductor.leader_lease_s)
    return limits


def _bind_grpc(server: grpc.aio.Server, host: str, port: int, tls: Tls | None) -> int:
    address = f"{host}:{port}"
    try:
        return server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls.server_credentials())
    except RuntimeError:
        raise ConfigError(f"server.grpc_port: cannot listen on {host}:{port}", param="server.grpc_port") from None
