"""`springtide store …`. Only options are declared here, as in `deploy.cli`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deploy.options import DEFAULT_URL, ClusterName, RedisUrl, Url

if TYPE_CHECKING:
    from deploy.commands.store import StoreCommandOptions
    from deploy.commands.store_blocks import NamedPrompt

store = typer.Typer(help="Shows and manages what the stores of a running cluster hold.", no_args_is_help=True)

NodeOption = Annotated[str | None, typer.Option("--store", metavar="NODE", help="this store only; default: all")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]
Keys = Annotated[list[str] | None, typer.Argument(metavar="KEY", help="of a block, or how it begins, as `ls` shows it")]
Text = Annotated[str | None, typer.Option("--prompt", help="the blocks of this prompt of a completion")]
ChatOption = Annotated[str | None, typer.Option("--chat", help="the blocks of a conversation that begins with this user's message")]
Tokens = Annotated[str | None, typer.Option("--tokens", metavar="ID,ID,…", help="the blocks of a prompt of these token ids")]
TenantOption = Annotated[str, typer.Option(help="whose prompt it is")]


@store.command()
def ls(
    key: Annotated[str, typer.Argument(metavar="KEY", help="show the blocks whose keys begin so, instead of whole chains")] = "",
    prompt: Text = None,
    chat: ChatOption = None,
    tokens: Tokens = None,
    tenant: TenantOption = "",
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="most chains of a store")] = 20,
    node: NodeOption = None,
    url: Url = DEFAULT_URL,
    redis_url: RedisUrl = None,
    cluster: ClusterName = "springtide",
    as_json: AsJson = False,
) -> None:
    """List the chains of blocks that are held: those in use and the last used first."""
    from deploy.commands import store as commands

    commands.ls(_options(url, redis_url, cluster, node, as_json), key, _prompt(prompt, chat, tokens, tenant), limit)


@store.command()
def stat(
    node: NodeOption = None,
    url: Url = DEFAULT_URL,
    redis_url: RedisUrl = None,
    cluster: ClusterName = "springtide",
    as_json: AsJson = False,
) -> None:
    """Show how full each store is, what is pinned, its hit rate and its tenants."""
    from deploy.commands import store as commands

    commands.stat(_options(url, redis_url, cluster, node, as_json))


@store.command()
def pins(
    node: NodeOption = None,
    url: Url = DEFAULT_URL,
    redis_url: RedisUrl = None,
    cluster: ClusterName = "springtide",
    as_json: AsJson = False,
) -> None:
    """List the pins."""
    from deploy.commands import store as commands

    commands.pins(_options(url, redis_url, cluster, node, as_json))


@store.command()
def pin(
    keys: Keys = None,
    prompt: Text = None,
    chat: ChatOption = None,
    tokens: Tokens = None,
    tenant: TenantOption = "",
    pin_id: Annotated[str | None, typer.Option("--id", help="default: from the last block's key")] = None,
    hard: Annotated[bool, typer.Option("--hard", help="never evict; without it, evict only when nothing else can go")] = False,
    ttl: Annotated[str, typer.Option(help="how long: 90s, 30m, 12h, 7d")] = "1h",
    node: NodeOption = None,
    url: Url = DEFAULT_URL,
    redis_url: RedisUrl = None,
    cluster: ClusterName = "springtide",
    as_json: AsJson = False,
) -> None:
    """Keep blocks, with all that come before them, wherever they are held. Again with the same blocks renews."""
    from deploy.commands import store as commands

    options = _options(url, redis_url, cluster, node, as_json)
    commands.pin(options, keys or [], _prompt(prompt, chat, tokens, tenant), pin_id, hard, ttl)


@store.command()
def unpin(
    pin_id: Annotated[str | None, typer.Argument(metavar="ID", help="as `pins` shows it")] = None,
    prompt: Text = None,
    chat: ChatOption = None,
    tokens: Tokens = None,
    tenant: TenantOption = "",
    node: NodeOption = None,
    url: Url = DEFAULT_URL,
    redis_url: RedisUrl = None,
    cluster: ClusterName = "springtide",
    as_json: AsJson = False,
) -> None:
    """End a pin, wherever it is."""
    from deploy.commands import store as commands

    commands.unpin(_options(url, redis_url, cluster, node, as_json), pin_id, _prompt(prompt, chat, tokens, tenant))


@store.command()
def evict(
    keys: Keys = None,
    prompt: Text = None,
    chat: ChatOption = None,
    tokens: Tokens = None,
    tenant: TenantOption = "",
    everything: Annotated[bool, typer.Option("--all", help="everything that nobody uses and no pin keeps")] = False,
    node: NodeOption = None,
    url: Url = DEFAULT_URL,
    redis_url: RedisUrl = None,
    cluster: ClusterName = "springtide",
    as_json: AsJson = False,
) -> None:
    """Forget blocks and all that continue them; of a prompt, those that are its alone."""
    from deploy.commands import store as commands

    commands.evict(_options(url, redis_url, cluster, node, as_json), keys or [], _prompt(prompt, chat, tokens, tenant), everything)


@store.command()
def verify(
    ssd: Annotated[bool, typer.Option("--ssd", help="read every block on SSD too, and drop those whose checksums are wrong")] = False,
    node: NodeOption = None,
    url: Url = DEFAULT_URL,
    redis_url: RedisUrl = None,
    cluster: ClusterName = "springtide",
    as_json: AsJson = False,
) -> None:
    """Have the stores check every invariant of theirs. Exit code 1 when one does not hold."""
    from deploy.commands import store as commands

    raise typer.Exit(commands.verify(_options(url, redis_url, cluster, node, as_json), ssd))


def _options(url: str, redis_url: str | None, cluster: str, node: str | None, as_json: bool) -> StoreCommandOptions:
    from deploy.commands.locate import Where
    from deploy.commands.store import StoreCommandOptions

    return StoreCommandOptions(Where(url, redis_url, cluster), node, as_json)


def _prompt(text: str | None, chat: str | None, tokens: str | None, tenant: str) -> NamedPrompt:
    from deploy.commands.store_blocks import NamedPrompt, parse_tokens

    if sum(part is not None for part in (text, chat, tokens)) > 1:
        raise typer.BadParameter("give one of --prompt, --chat and --tokens, not several")
    return NamedPrompt(text, chat, parse_tokens(tokens) if tokens is not None else None, tenant)
