"""The options of `springtide ca`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.options import DEFAULT_URL, ClusterName, Url

ca = typer.Typer(help="The certificate authority of a cluster: by what it has signed, its processes know each other.", no_args_is_help=True)
Directory = Annotated[
    Path | None, typer.Option("--dir", help="where it is; default: that of the cluster that runs here and serves at --url")
]


@ca.command("init")
def init(directory: Annotated[Path, typer.Argument(help="for `tls.ca_dir`")], cluster: ClusterName = "springtide") -> None:
    """Make an authority. `springtide up` makes one of its own where none is named."""
    from deploy.commands import ca as commands

    commands.init(directory, cluster)


@ca.command("show")
def show(directory: Directory = None, url: Url = DEFAULT_URL) -> None:
    """Show whom the cluster's processes believe, and until when."""
    from deploy.commands import ca as commands

    commands.show(directory, url)


@ca.command("issue")
def issue(
    name: Annotated[str, typer.Argument(help="what the certificate is for, such as `prometheus`")],
    out: Annotated[Path, typer.Option("--out", "-o", help="directory for tls.crt, tls.key and ca.crt")],
    address: Annotated[list[str] | None, typer.Option(help="an IP address or a host name that it is good for; repeatable")] = None,
    directory: Directory = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Make a key and a certificate: for a scraper of metrics, or for `tls.certificate` and `tls.key` of a machine."""
    from deploy.commands import ca as commands

    commands.issue(name, address or [], out, directory, url)


@ca.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(help="of the node, as in `springtide status`")], directory: Directory = None, url: Url = DEFAULT_URL
) -> None:
    """Shut a machine out: its certificate is not renewed, does not let it come back, and does not open the head's Valkey."""
    from deploy.commands import ca as commands

    commands.revoke(name, directory, url)


@ca.command("rotate")
def rotate(directory: Directory = None, url: Url = DEFAULT_URL) -> None:
    """Have another key sign from now on. The cluster's machines follow by themselves; the old key is believed until `retire`."""
    from deploy.commands import ca as commands

    commands.rotate(directory, url)


@ca.command("retire")
def retire(directory: Directory = None, url: Url = DEFAULT_URL) -> None:
    """Believe the present key alone: what an older one has signed is worth nothing once every machine knows."""
    from deploy.commands import ca as commands

    commands.retire(directory, url)
