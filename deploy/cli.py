"""The `springtide` command. Only options are declared here; what a subcommand does is imported when it is run, so that --help is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from deploy.accounts_cli import keys, tenants, usage
from deploy.ca_cli import ca
from deploy.cache_cli import cache
from deploy.options import DEFAULT_URL, Ca, ClusterName, RedisUrl, SettingsOption, Url, names_of, parse_settings
from deploy.simulate_cli import simulate
from deploy.store_cli import store
from deploy.token_cli import token
from springtide.choices import DtypeName, NodeRole
from springtide.errors import ConfigError, SpringtideError

if TYPE_CHECKING:
    from springtide.config import ClusterConfig

MAX_REPLAYED_BLOCKS = 1 << 28
"""Of `bench kvstore`: some 40 GiB of memory."""

app = typer.Typer(
    name="springtide",
    help="Serves large language models from a disaggregated, KVCache-centric cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measures a running cluster, or its cache on a trace.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(store, name="store")
app.add_typer(cache, name="cache")
app.add_typer(ca, name="ca")
app.add_typer(token, name="token")
app.add_typer(keys, name="keys")
app.add_typer(tenants, name="tenants")
app.command()(usage)
app.command()(simulate)

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML; see docs/configuration.md")]


@app.command()
def up(
    config: ConfigFile = None,
    instances: Annotated[
        int | None, typer.Option(help="nodes that prefill, decode or do both, as each request is served best; default: 2")
    ] = None,
    prefill: Annotated[
        int | None, typer.Option(help="nodes that prefill alone; default: none, or 1 with --decode and no --instances")
    ] = None,
    decode: Annotated[int | None, typer.Option(help="nodes that decode alone; the same, with --prefill")] = None,
    model: Annotated[str | None, typer.Option(help="'demo', a Hugging Face directory or a GGUF file")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="the name that clients use")] = None,
    dtype: Annotated[str | None, typer.Option(help=names_of(DtypeName))] = None,
    max_context: Annotated[int | None, typer.Option(help="longest prompt and output together, in tokens")] = None,
    address: Annotated[str | None, typer.Option(help="where other machines reach this one, over TLS; default: nowhere")] = None,
    ray: Annotated[str | None, typer.Option(help="a Ray cluster to place the nodes on: HOST:PORT, auto or local")] = None,
    host: Annotated[str | None, typer.Option(help="address to serve clients on")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port; 0 takes a free one")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port; 0 takes a free one")] = None,
    separate_gateway: Annotated[bool | None, typer.Option("--separate-gateway", help="the gateway in a process of its own")] = None,
    arena_size: Annotated[str | None, typer.Option(help="DRAM that each node lends to the pool, such as 1GiB")] = None,
    block_tokens: Annotated[int | None, typer.Option(help="tokens of a KV block")] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="most tokens of one prompt prefilled in one pass")] = None,
    redis_url: Annotated[str | None, typer.Option(help="a Valkey or Redis to use instead of an embedded one")] = None,
    profile: Annotated[Path | None, typer.Option(help="a file of `springtide profile`")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="where sockets and logs go; kept when the cluster stops")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json")] = None,
    observe: Annotated[
        bool | None, typer.Option("--observe", help="Prometheus and Alertmanager, where they are installed, with rules and dashboards")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show every process's log, not its warnings only")] = False,
    die_with_parent: Annotated[bool, typer.Option("--die-with-parent", help="stop when the process that started this one ends")] = False,
    set_: SettingsOption = None,
) -> None:
    """Start a cluster on this machine, or with its nodes on Ray, and serve until SIGTERM or Ctrl-C."""
    from deploy.local.display import new_display
    from deploy.local.exec_child import signal_on_parent_death
    from deploy.local.up import run_up

    if die_with_parent:
        signal_on_parent_death()
    options = {
        "instances": instances,
        "prefill": prefill,
        "decode": decode,
        "model": model,
        "served_model_name": served_model_name,
        "dtype": dtype,
        "max_context": max_context,
        "address": address,
        "ray.address": ray,
        "server.host": host,
        "server.port": port,
        "server.grpc_port": grpc_port,
        "server.separate_gateway": separate_gateway,
        "kv.arena_size": arena_size,
        "kv.block_tokens": block_tokens,
        "prefill_node.chunk_tokens": chunk_tokens,
        "redis_url": redis_url,
        "profile": profile,
        "run_dir": run_dir,
        "log.level": log_level,
        "log.format": log_format,
        "observe.enabled": observe,
    }
    cluster_config = _load(config, {**parse_settings(set_), **_given(options)})
    raise typer.Exit(run_up(cluster_config, new_display(), verbose=verbose))


@app.command()
def node(
    join: Annotated[
        str, typer.Option(help="HOST:PORT of the cluster's head, as it says at its start; of several, A,B, the first that answers")
    ],
    role: Annotated[
        NodeRole, typer.Argument(help="what this machine is to be for the cluster; an instance prefills and decodes")
    ] = "instance",
    token: Annotated[
        str | None,
        typer.Option(
            envvar="SPRINGTIDE_JOIN_TOKEN",
            help="of `springtide token create` at the head; not needed where --run-dir is that of a node that has joined before",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="of this node in the cluster; default: the role and the host's name")] = None,
    group: Annotated[str | None, typer.Option(help="prefill: the group over several machines that has a stage here, by its name")] = None,
    stage: Annotated[str | None, typer.Option(help="prefill: which stage of the group, and of how many, from 0/X to X-1/X")] = None,
    address: Annotated[
        str | None, typer.Option(help="of this machine, where the others reach it; default: from which it reaches the head")
    ] = None,
    config: ConfigFile = None,
    model: Annotated[str | None, typer.Option(help="where the model's files are on this machine; default: as at the head")] = None,
    host: Annotated[str | None, typer.Option(help="gateway: address to serve clients on")] = None,
    port: Annotated[int | None, typer.Option(help="gateway: HTTP port; 0 takes a free one")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gateway: gRPC port; 0 takes a free one")] = None,
    arena_size: Annotated[str | None, typer.Option(help="DRAM that this machine lends to the pool, such as 1GiB")] = None,
    drain: Annotated[float | None, typer.Option(min=0.0, help="seconds for what runs to end when it is told to stop; default: 30")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="where keys, sockets and logs go; kept when the node stops")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show every process's log, not its warnings only")] = False,
    set_: SettingsOption = None,
) -> None:
    """Have this machine join a running cluster, until SIGTERM or Ctrl-C has it leave."""
    from deploy.local.display import new_display
    from deploy.local.node import NodeOptions, join_services, run_node, stage_place

    settings = {
        "address": address,
        "model": model,
        "server.host": host,
        "server.port": port,
        "server.grpc_port": grpc_port,
        "kv.arena_size": arena_size,
        "drain_s": drain,
        "run_dir": run_dir,
    }
    place = stage_place(role, name, group, stage)
    options = NodeOptions(role, join_services(join), token, name, config, {**parse_settings(set_), **_given(settings)}, place)
    raise typer.Exit(run_node(options, new_display(), verbose=verbose))


@app.command()
def status(
    url: Url = DEFAULT_URL,
    redis_url: RedisUrl = None,
    cluster: ClusterName = "springtide",
    predictions: Annotated[bool, typer.Option("--predictions", help="show how good the recent predictions were instead")] = False,
) -> None:
    """Show a running cluster's nodes, slots, queues and hit rate."""
    from deploy.commands.locate import Where
    from deploy.commands.status import status as show

    show(Where(url, redis_url, cluster), predictions=predictions)


@app.command()
def move(
    instance: Annotated[str, typer.Argument(help="a decode node or an instance, by the name that `springtide status` shows")],
    most: Annotated[int, typer.Option("--most", min=1, help="so many of them, a few at a time")] = 1,
    url: Url = DEFAULT_URL,
    redis_url: RedisUrl = None,
    cluster: ClusterName = "springtide",
) -> None:
    """Have sequences that decode at a node go on at others while they run."""
    from deploy.commands.locate import Where
    from deploy.commands.move import move as have_move

    have_move(Where(url, redis_url, cluster), instance, most)


@app.command()
def top(
    url: Url = DEFAULT_URL,
    ca: Ca = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="an operator's shows all, a tenant's its own requests"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="print it once")] = False,
) -> None:
    """Watch a running cluster in the terminal, as its console shows it; q ends it."""
    from deploy.commands.top import TopOptions
    from deploy.commands.top import top as watch

    watch(TopOptions(url, ca, api_key, once))


@app.command()
def chat(
    question: Annotated[str | None, typer.Argument(help="one question; without it, a conversation")] = None,
    url: Url = DEFAULT_URL,
    ca: Ca = None,
    model: Annotated[str | None, typer.Option(help="default: the one that is served")] = None,
    system: Annotated[str | None, typer.Option(help="a system prompt")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="most tokens of an answer")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy; small models ramble at 1")] = 0.2,
) -> None:
    """Talk to the model; shows TTFT, tokens/s and cached tokens of each answer."""
    from deploy.commands.chat import ChatOptions
    from deploy.commands.chat import chat as converse

    converse(question, ChatOptions(url, ca, model, system, max_tokens, temperature))


@app.command()
def config(
    config: ConfigFile = None,
    set_: SettingsOption = None,
    describe: Annotated[bool, typer.Option("--describe", help="every setting there is, as Markdown")] = False,
) -> None:
    """Print the configuration that the file, the environment and --set make together."""
    import yaml

    from deploy.commands.reference import configuration_reference

    if describe:
        typer.echo(configuration_reference(), nl=False)
    else:
        resolved = _load(config, parse_settings(set_))
        typer.echo(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False), nl=False)


@app.command()
def metrics() -> None:
    """Print what every metric of every process means, as Markdown."""
    from deploy.commands.metrics_reference import metrics_reference

    typer.echo(metrics_reference(), nl=False)


@app.command()
def profile(
    model: Annotated[str, typer.Option(help="'demo', a Hugging Face directory or a GGUF file")] = "demo",
    dtype: Annotated[str, typer.Option(help=names_of(DtypeName))] = "bfloat16",
    threads: Annotated[int | None, typer.Option(min=1, help="of each rank; default: the machine's cores, shared by two engines")] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="processes that share out the layers of one engine")] = 1,
    block_tokens: Annotated[int, typer.Option(min=8, max=1024)] = 64,
    max_context: Annotated[int, typer.Option(min=256, help="longest context measured, in tokens")] = 2048,
    output: Annotated[Path, typer.Option("--output", "-o", help="for `springtide up --profile`")] = Path("profile.json"),
) -> None:
    """Measure this machine's prefill and decode cost and write the fitted models to a file."""
    from deploy.commands.profile import ProfileOptions
    from deploy.commands.profile import profile as measure

    measure(ProfileOptions(model, dtype, threads, tensor_parallel, block_tokens, max_context, output))


@bench.command("serve")
def bench_serve(
    url: Url = DEFAULT_URL,
    ca: Ca = None,
    model: Annotated[str | None, typer.Option(help="default: the one that is served")] = None,
    requests: Annotated[int, typer.Option(min=1)] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 512,
    output_tokens: Annotated[int, typer.Option(min=1)] = 64,
    concurrency: Annotated[int | None, typer.Option(min=1, help="requests at a time; default 8 unless there is a rate")] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="requests a second, arriving as a Poisson process")] = None,
    shared_prefix: Annotated[float, typer.Option(min=0.0, max=1.0, help="the share of each prompt that all have in common")] = 0.0,
    vocab_size: Annotated[
        int | None, typer.Option(min=65, help="prompts have random token ids below it; default: the local cluster's, or 32000")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    ttft_slo_ms: Annotated[float, typer.Option(min=0.0, help="for the goodput")] = 2000.0,
    tbt_slo_ms: Annotated[float, typer.Option(min=0.0, help="for the goodput; every gap of a request must keep it")] = 200.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the JSON to a file too")] = None,
) -> None:
    """Drive a running cluster; report throughput, goodput, TTFT and TBT."""
    from deploy.bench.serve import BenchOptions, local_vocab_size
    from deploy.bench.serve import bench_serve as run
    from deploy.bench.workload import BenchWorkload

    if concurrency is not None and rate is not None:
        raise typer.BadParameter("give either --concurrency or --rate, not both")
    workload = BenchWorkload(
        requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        shared_prefix=shared_prefix,
        concurrency=None if rate is not None else concurrency or 8,
        rate=rate,
        vocab_size=vocab_size or local_vocab_size(url) or 32000,
        seed=seed,
    )
    raise typer.Exit(run(workload, BenchOptions(url, ca, model, ttft_slo_ms, tbt_slo_ms, as_json, output)))


@bench.command("kvstore")
def bench_kvstore(
    trace: Annotated[Path, typer.Option(help="JSONL: timestamp (ms), input_length, output_length, hash_ids (block ids) of each request")],
    capacity: Annotated[str, typer.Option(help="in blocks, separated by commas")] = "1000,3000,10000,30000,50000,100000",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Replay a trace through the pool: each eviction policy's hit rate, beside an infinite cache's and Belady's optimum."""
    from deploy.bench.kvstore import TraceOptions
    from deploy.bench.kvstore import bench_kvstore as run

    run(TraceOptions(trace, _parse_capacities(capacity), as_json))


def main() -> None:
    try:
        app()
    except ConfigError as error:
        _fail(error, 2)
    except SpringtideError as error:
        _fail(error, 1)


def _fail(error: SpringtideError, code: int) -> None:
    Console(stderr=True).print(f"[red]error:[/] {escape(error.message)}", highlight=False, soft_wrap=True)
    sys.exit(code)


def _load(path: Path | None, overrides: dict[str, Any]) -> ClusterConfig:
    from springtide.config import load_config

    return load_config(path, overrides)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _parse_capacities(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= MAX_REPLAYED_BLOCKS for part in parts):
        raise ConfigError(
            f"--capacity: write numbers of blocks up to {MAX_REPLAYED_BLOCKS} separated by commas, such as 1000,50000, not {text!r}"
        )
    return [int(part) for part in parts]


if __name__ == "__main__":
    main()
