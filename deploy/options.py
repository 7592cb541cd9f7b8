"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from springtide.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option("--url", help="where the cluster serves HTTP")]
Ca = Annotated[Path | None, typer.Option("--ca", help="PEM file of the authorities that a cluster at https://… is trusted for")]
RedisUrl = Annotated[str | None, typer.Option(help="the Valkey or Redis of a cluster that runs elsewhere")]
ClusterName = Annotated[str, typer.Option("--cluster", help="its name there, setting `cluster`")]
SettingsOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="any setting of docs/configuration.md; repeatable")
]


def names_of(choice: Any) -> str:
    """The names of a Literal of springtide/choices.py, as a sentence has them."""
    *names, last = get_args(choice)
    return f"{', '.join(names)} or {last}"


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    """The settings in `kv.block_tokens=32`; values are read as YAML. Raises ConfigError."""
    import yaml

    parsed = {}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set {setting}: write --set KEY=VALUE, for example --set kv.block_tokens=32")
        try:
            parsed[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"--set {setting}: {value!r} is not a value in YAML") from None
    return parsed
