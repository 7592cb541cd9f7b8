"""`springtide cache …`. Only options are declared here, as in `deploy.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.options import DEFAULT_URL, Ca, Url

if TYPE_CHECKING:
    from deploy.commands.cache import CacheCommandOptions

cache = typer.Typer(help="Makes, lists and ends context caches (docs/context-caching.md).", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]
ApiKeyOption = Annotated[
    str | None,
    typer.Option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="whose caches they are, where the cluster has keys"),
]
CacheId = Annotated[str, typer.Argument(metavar="ID", help="as `ls` shows it")]


@cache.command()
def create(
    file: Annotated[Path | None, typer.Argument(help="a text, for the system message; or with `.json` a list of messages")] = None,
    system: Annotated[str | None, typer.Option(help="the system message, in place of a file")] = None,
    name: Annotated[str, typer.Option(help="to know it by")] = "",
    tag: Annotated[str | None, typer.Option(help="a name by which requests may call it")] = None,
    ttl: Annotated[str, typer.Option(help="how long it is kept: 90s, 30m, 12h, 7d")] = "1h",
    replicas: Annotated[int, typer.Option(min=1, max=16, help="in how many stores")] = 1,
    soft: Annotated[bool, typer.Option("--soft", help="give its room to running requests when nothing else can go")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="return when it is ready; exit code 1 when it cannot be computed")] = False,
    url: Url = DEFAULT_URL,
    ca: Ca = None,
    api_key: ApiKeyOption = None,
    as_json: AsJson = False,
) -> None:
    """Have a conversation's beginning computed and kept."""
    from deploy.commands import cache as commands

    draft = commands.Draft(file, system, name, tag, ttl, replicas, soft)
    raise typer.Exit(commands.create(_options(url, ca, api_key, as_json), draft, wait))


@cache.command()
def ls(url: Url = DEFAULT_URL, ca: Ca = None, api_key: ApiKeyOption = None, as_json: AsJson = False) -> None:
    """List the caches, the newest first."""
    from deploy.commands import cache as commands

    commands.ls(_options(url, ca, api_key, as_json))


@cache.command()
def rm(cache_id: CacheId, url: Url = DEFAULT_URL, ca: Ca = None, api_key: ApiKeyOption = None) -> None:
    """End a cache: its blocks are kept no longer than others."""
    from deploy.commands import cache as commands

    commands.rm(_options(url, ca, api_key, False), cache_id)


@cache.command()
def stat(
    cache_id: CacheId,
    extend: Annotated[str | None, typer.Option(metavar="TTL", help="keep it for so long from now, first: 90s, 30m, 12h, 7d")] = None,
    url: Url = DEFAULT_URL,
    ca: Ca = None,
    api_key: ApiKeyOption = None,
    as_json: AsJson = False,
) -> None:
    """Show one: how it is doing, where it is held, and what it has taken and saved."""
    from deploy.commands import cache as commands

    commands.stat(_options(url, ca, api_key, as_json), cache_id, extend)


def _options(url: str, ca: Path | None, api_key: str | None, as_json: bool) -> CacheCommandOptions:
    from deploy.commands.cache import CacheCommandOptions

    return CacheCommandOptions(url, ca, api_key, as_json)
