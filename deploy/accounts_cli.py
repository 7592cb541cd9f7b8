"""`springtide keys …`, `springtide tenants …` and `springtide usage`. Only options are declared here, as in `deploy.cli`."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from deploy.options import DEFAULT_URL, ClusterName, RedisUrl, Url

if TYPE_CHECKING:
    from gateway.accounts.allowance import Allowance

keys = typer.Typer(help="Makes, lists and revokes the API keys of a cluster.", no_args_is_help=True)
tenants = typer.Typer(help="Sets and lists what tenants may have.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]
Models = Annotated[str | None, typer.Option(metavar="NAME,NAME,…", help="only these; default: all")]
Amount = Annotated[int | None, typer.Option(min=1, help="default: no limit")]


@keys.command()
def create(
    tenant: Annotated[str, typer.Argument(help="whose key it is")],
    name: Annotated[str, typer.Option(help="to know it by")] = "",
    models: Models = None,
    requests_per_minute: Amount = None,
    tokens_per_minute: Amount = None,
    cache_tokens: Amount = None,
    batch_lines: Amount = None,
    batch_tokens_per_minute: Amount = None,
    expires: Annotated[str | None, typer.Option(help="after how long: 12h, 30d; default: never")] = None,
    operator: Annotated[bool, typer.Option("--operator", help="its holder sees what all tenants do, in the console")] = False,
    url: Url = DEFAULT_URL,
    redis_url: RedisUrl = None,
    cluster: ClusterName = "springtide",
    as_json: AsJson = False,
) -> None:
    """Make a key. It is shown once and kept nowhere; every gateway takes it within a second."""
    from deploy.commands import accounts as commands
    from deploy.commands.locate import Where

    allowance = _allowance(models, requests_per_minute, tokens_per_minute, cache_tokens, batch_lines, batch_tokens_per_minute)
    commands.create_key(Where(url, redis_url, cluster), tenant, name, allowance, expires, as_json, operator=operator)


@keys.command("ls")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="this one's only")] = None,
    everything: Annotated[bool, typer.Option("--all", help="those that are revoked or have expired too")] = False,
    url: Url = DEFAULT_URL,
    redis_url: RedisUrl = None,
    cluster: ClusterName = "springtide",
    as_json: AsJson = False,
) -> None:
    """List the keys, by their ids; the keys themselves are kept nowhere."""
    from deploy.commands import accounts as commands
    from deploy.commands.locate import Where

    commands.list_keys(Where(url, redis_url, cluster), tenant, everything, as_json)


@keys.command()
def revoke(
    key: Annotated[str, typer.Argument(metavar="ID", help="the key's id, or the key itself")],
    url: Url = DEFAULT_URL,
    redis_url: RedisUrl = None,
    cluster: ClusterName = "springtide",
) -> None:
    """End a key. Every gateway refuses it within a second; what it is answering is answered to the end."""
    from deploy.commands import accounts as commands
    from deploy.commands.locate import Where

    commands.revoke_key(Where(url, redis_url, cluster), key)


@tenants.command("set")
def set_tenant(
    tenant: Annotated[str, typer.Argument(help="whose limits these are, all its keys together")],
    models: Models = None,
    requests_per_minute: Amount = None,
    tokens_per_minute: Amount = None,
    cache_tokens: Amount = None,
    batch_lines: Amount = None,
    batch_tokens_per_minute: Amount = None,
    url: Url = DEFAULT_URL,
    redis_url: RedisUrl = None,
    cluster: ClusterName = "springtide",
) -> None:
    """Set what a tenant may have, in the place of all that was set before: a limit that is not given is none."""
    from deploy.commands import accounts as commands
    from deploy.commands.locate import Where

    allowance = _allowance(models, requests_per_minute, tokens_per_minute, cache_tokens, batch_lines, batch_tokens_per_minute)
    commands.set_tenant(Where(url, redis_url, cluster), tenant, allowance)


@tenants.command("ls")
def list_tenants(url: Url = DEFAULT_URL, redis_url: RedisUrl = None, cluster: ClusterName = "springtide", as_json: AsJson = False) -> None:
    """List what tenants may have."""
    from deploy.commands import accounts as commands
    from deploy.commands.locate import Where

    commands.list_tenants(Where(url, redis_url, cluster), as_json)


def usage(
    tenant: Annotated[str | None, typer.Option(help="this one's only")] = None,
    from_: Annotated[datetime.datetime | None, typer.Option("--from", formats=["%Y-%m-%d"], help="in UTC; default: 30 days ago")] = None,
    to: Annotated[datetime.datetime | None, typer.Option("--to", formats=["%Y-%m-%d"], help="this day included; default: today")] = None,
    by: Annotated[str, typer.Option(help="tenant, day, key, model or endpoint; several with commas")] = "tenant",
    format_: Annotated[Literal["table", "csv", "json"], typer.Option("--format")] = "table",
    url: Url = DEFAULT_URL,
    redis_url: RedisUrl = None,
    cluster: ClusterName = "springtide",
) -> None:
    """Show what was served: requests, prompt, cached and output tokens; batches apart."""
    from deploy.commands import accounts as commands
    from deploy.commands.locate import Where

    days = (None if from_ is None else from_.date(), None if to is None else to.date())
    commands.show_usage(Where(url, redis_url, cluster), tenant, days, by, format_)


def _allowance(
    models: str | None,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    cache_tokens: int | None,
    batch_lines: int | None,
    batch_tokens_per_minute: int | None,
) -> Allowance:
    from gateway.accounts.allowance import Allowance

    names = tuple(name for part in (models or "").split(",") if (name := part.strip()))
    return Allowance(names, requests_per_minute, tokens_per_minute, cache_tokens, batch_lines, batch_tokens_per_minute)
