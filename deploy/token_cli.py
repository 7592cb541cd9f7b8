"""The options of `springtide token`."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.options import DEFAULT_URL, Url

token = typer.Typer(help="Join tokens: with one, a machine may join the cluster that runs here.", no_args_is_help=True)


@token.command("create")
def create(
    ttl: Annotated[str, typer.Option(help="how long it holds, such as 30m, 1h or 7d")] = "1h",
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Make a token and print it: it is not shown again."""
    from deploy.commands import tokens as commands

    commands.create(ttl, url, as_json)


@token.command("list")
def list_tokens(url: Url = DEFAULT_URL) -> None:
    """Show the tokens that hold, by their ids."""
    from deploy.commands import tokens as commands

    commands.show(url)


@token.command("revoke")
def revoke(token_id: Annotated[str, typer.Argument(help="the first eight characters of a token")], url: Url = DEFAULT_URL) -> None:
    """End a token before its time. Who has joined with it stays."""
    from deploy.commands import tokens as commands

    commands.revoke(token_id, url)
