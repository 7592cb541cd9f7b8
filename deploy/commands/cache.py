"""`springtide cache`: the context caches of a running cluster, over its HTTP API."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.commands.store import parse_ttl
from springtide.client import Client
from springtide.client.calls import Call
from springtide.errors import ConfigError

_LOOK_EVERY_S = 0.2
_LISTED = 100
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CacheCommandOptions:
    url: str
    ca: Path | None
    api_key: str | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class Draft:
    """What is to be kept, as the command line says it."""

    file: Path | None
    system: str | None
    name: str
    tag: str | None
    ttl: str
    replicas: int
    soft: bool

    def messages(self) -> list[Json]:
        """Raises ConfigError."""
        if (self.file is None) == (self.system is None):
            raise ConfigError("name what is to be kept: a FILE, or --system TEXT")
        if self.file is None:
            return [{"role": "system", "content": self.system}]
        try:
            text = self.file.read_text()
            said = json.loads(text) if self.file.suffix == ".json" else [{"role": "system", "content": text}]
        except OSError as error:
            raise ConfigError(f"{self.file} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{self.file} is not JSON of messages: {error}") from None
        if not isinstance(said, list):
            raise ConfigError(f'{self.file} must hold a list of messages, such as [{{"role": "system", "content": "…"}}]')
        return said


def create(options: CacheCommandOptions, draft: Draft, wait: bool) -> int:
    """Returns the exit code."""
    body: Json = {"messages": draft.messages(), "ttl": round(parse_ttl(draft.ttl)), "replicas": draft.replicas, "name": draft.name}
    body["pin"] = "soft" if draft.soft else "hard"
    with _client(options) as client:
        made = client.call(_call("POST", "/v1/caching", {"model": client.model(), **body}))
        if draft.tag is not None:
            client.call(_call("POST", "/v1/caching/refs/tags", {"tag": draft.tag, "cache_id": made["id"]}))
        while wait and made["status"] == "pending":
            time.sleep(_LOOK_EVERY_S)
            made = client.call(_call("GET", f"/v1/caching/{made['id']}"))
    _show(options, [made])
    return 1 if made["status"] == "error" else 0


def ls(options: CacheCommandOptions) -> None:
    found: list[Json] = []
    with _client(options) as client:
        while True:
            after = f"&after={found[-1]['id']}" if found else ""
            page = client.call(_call("GET", f"/v1/caching?limit={_LISTED}{after}"))["data"]
            found += page
            if len(page) < _LISTED:
                break
    _show(options, found)


def rm(options: CacheCommandOptions, cache_id: str) -> None:
    with _client(options) as client:
        client.call(_call("DELETE", f"/v1/caching/{cache_id}"))
    Console().print(f"{cache_id} is kept no longer", highlight=False, markup=False)


def stat(options: CacheCommandOptions, cache_id: str, extend: str | None) -> None:
    with _client(options) as client:
        if extend is not None:
            client.call(_call("PUT", f"/v1/caching/{cache_id}", {"ttl": round(parse_ttl(extend, "--extend"))}))
        cache = client.call(_call("GET", f"/v1/caching/{cache_id}"))
    if options.as_json:
        print(json.dumps(cache, indent=2, ensure_ascii=False))
        return
    meter = cache["meter"]
    rows = {
        "id": cache["id"],
        "name": cache["name"],
        "status": cache["status"] + (f": {cache['error']['message']}" if "error" in cache else ""),
        "tokens": cache["tokens"],
        "until": _time(cache["expired_at"]),
        "pin": cache["pin"],
        "held in": f"{cache['replicas_held']} of {cache['replicas']} stores",
        "computed": f"{meter['creation_tokens']} tokens",
        "used": f"{meter['calls']} times, which saved {meter['saved_tokens']} tokens",
        "kept for": f"{meter['storage_token_minutes']} token minutes",
    }
    table = Table(box=box.SIMPLE, show_header=False)
    for name, value in rows.items():
        table.add_row(name, escape(str(value)))
    Console().print(table)


def _client(options: CacheCommandOptions) -> Client:
    return Client(options.url, api_key=options.api_key, ca=options.ca)


def _call(method: str, path: str, body: Json | None = None) -> Call[Json]:
    return Call(method, path, lambda response: dict(response.json()), json=body, repeatable=method == "GET")


def _show(options: CacheCommandOptions, caches: Sequence[Json]) -> None:
    if options.as_json:
        shown = [{name: value for name, value in cache.items() if name not in ("messages", "tools")} for cache in caches]
        print(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    table = Table(box=box.SIMPLE)
    for column in ("id", "name", "status", "tokens", "until", "pin", "held", "calls", "saved"):
        table.add_column(column, justify="right" if column in ("tokens", "calls", "saved") else "left")
    for cache in caches:
        meter = cache["meter"]
        held = f"{cache['replicas_held']}/{cache['replicas']}"
        cells = (cache["id"], cache["name"], cache["status"], cache["tokens"], _time(cache["expired_at"]), cache["pin"], held)
        table.add_row(*map(escape, map(str, (*cells, meter["calls"], meter["saved_tokens"]))))
    Console().print(table)


def _time(unix_s: int) -> str:
    return datetime.datetime.fromtimestamp(unix_s).astimezone().isoformat(sep=" ", timespec="seconds")
