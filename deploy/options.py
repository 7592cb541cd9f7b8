"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option("--url", help="where the cluster serves HTTP")]
RedisUrl = Annotated[str | None, typer.Option(help="the Valkey or Redis of a cluster that runs elsewhere")]
ClusterName = Annotated[str, typer.Option("--cluster", help="its name there, setting `cluster`")]
