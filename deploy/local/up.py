"""`springtide up`: brings a cluster up on this machine, keeps it up until it is told to stop, leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import shutil
import sys
from pathlib import Path

from deploy.local.certificates import OwnCertificates
from deploy.local.display import Display
from deploy.local.plan import ClusterPaths, ProcessSpec, check_redis, placed, processes, resolve
from deploy.local.rundir import ClusterRecord
from deploy.local.session import Machine, Session, Work, own_run_dir
from deploy.observe.plan import Observation
from deploy.ray.settings import LOCAL, on_ray
from engine.formats.files import describe
from springtide.capacity import check_memory, context_tokens, memory_bytes
from springtide.config import ClusterConfig
from springtide.errors import ConfigError
from springtide.modelinfo import ModelInfo

QUESTION = "Why is the sky blue?"


def run_up(config: ClusterConfig, display: Display, *, verbose: bool) -> int:
    """Runs a cluster in the foreground until SIGTERM or SIGINT; returns the exit code.

    Raises ConfigError or UnsupportedModel before anything is started.
    """
    if config.ray.address is not None:
        config = on_ray(config)
    info = describe(config.model, config.max_context)
    check_memory(config.kv, config.num_nodes if config.ray.address in (None, LOCAL) else 0, memory_bytes())
    context = context_tokens(config, info)
    if config.redis_url is not None:
        check_redis(config.redis_url, config.tls)
    resolved = resolve(config)
    if resolved.join_port is None and not config.serves_alone:
        raise ConfigError(
            "prefill and decode: a cluster of this machine alone has instances, or one of each at least; with --address, others may join it"
        )
    with own_run_dir("springtide supervisor", config.run_dir) as run_dir:
        machine = _machine(placed(resolved, run_dir.path), info, config.redis_url is None, run_dir.temporary)
        with display:
            if context < info.context_length:
                display.message(
                    f"kv.arena_size: {config.kv.arena_size} bytes a node hold {context} tokens, fewer than the context of {info.name}, "
                    f"{info.context_length}: a prompt and its output may have {context} together"
                )
            return asyncio.run(_run(machine, display, verbose))


async def _run(machine: Machine, display: Display, verbose: bool) -> int:
    return await Session(machine, display, verbose, lambda record, took_s: _greeting(machine, record, took_s)).run()


def _machine(config: ClusterConfig, info: ModelInfo, embedded_valkey: bool, temporary: bool) -> Machine:
    """Of a placed configuration. Makes its certificates, where other machines are let in."""
    assert config.run_dir is not None, "the configuration must be placed"
    paths = ClusterPaths(config.run_dir)
    certificates = OwnCertificates.of(config)
    beside: dict[str, Work] = {}
    join_address = ""
    if certificates is not None:
        config = certificates.prepare(config)
        beside["renew certificates"] = certificates.keep_renewed
    observation = Observation.of(config)
    watching: list[ProcessSpec] = []
    if observation is not None:
        observation.prepare()
        beside["follow targets"] = observation.follow
        watching = observation.processes()
    if config.join_port is not None:
        from deploy.local.head import HeadServices  # with what serves HTTP: others start sooner without

        head = HeadServices(config, info, certificates, embedded_valkey)
        beside["head services"] = head.run
        join_address = head.join_address
    return Machine(
        config,
        info,
        paths,
        [*processes(config, paths, embedded_valkey), *watching],
        temporary,
        beside,
        serves_requests=config.serves_alone,
        ca_dir=None if certificates is None else certificates.authority_directory,
        join_address=join_address,
    )


def _greeting(machine: Machine, record: ClusterRecord, took_s: float) -> str:
    name, url = machine.served_model_name, record.url
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0})
    curl = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    chat = f"{own_command()} chat --url {url} {shlex.quote(QUESTION)}"
    join, ray = "", machine.config.ray
    if (observation := Observation.of(machine.config)) is not None:
        join += f"\n\n{observation.greeting()}"
    if ray.address is not None:
        join += f"\n\nIts nodes are on the Ray cluster at {ray.address}; {machine.paths.log('placer')} says where."
    if machine.join_address:
        token = f"{own_command()} token create --url {url}"
        join += f"\n\nOther machines join with a token of `{token}`:\n\n  springtide node --join {machine.join_address} --token TOKEN"
    return (
        f"\nSpringtide serves {name} on {url} (ready after {took_s:.1f} s; gRPC on {record.grpc_address}; "
        f"logs in {machine.paths.run_dir / 'logs'})\n\n  {curl}\n\n  {chat}\n\nWatch it at {url}/console, or by "
        f"`{own_command()} top --url {url}`.{join}\n\nCtrl-C stops it."
    )


def own_command() -> str:
    """How the user can call this program again: by its name if that is on the PATH, else by the path of it."""
    program = Path(sys.argv[0])
    if program.name != "springtide":
        return f"{shlex.quote(sys.executable)} -m deploy.cli"
    found = shutil.which("springtide")
    if found is not None and Path(found).resolve() == program.resolve():
        return "springtide"
    with contextlib.suppress(ValueError):
        return shlex.quote(str(program.absolute().relative_to(Path.cwd())))
    return shlex.quote(str(program.absolute()))
