"""`springtide top`: the console in a terminal, by the same endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import termios
import time
import tty
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gateway.console import deltas
from gateway.console.picture import IDLE, LOAD, QUEUE_MS, READY, ROLE, RUNNING, SILENT_S, SLOTS, SLOTS_USED, STEP_MS, WAITING
from springtide.client import calls
from springtide.errors import SpringtideError, Unauthenticated
from springtide.ids import engine_of
from springtide.protocol.instances import Role
from springtide.protocol.observation import BUCKET_S, MOST_BUCKETS, TimeBucket
from springtide.supervision import first_of

_AGAIN_S = 2.0
_SILENT_S = 15.0
_LINES = "▁▂▃▄▅▆▇█"
_MINUTE = 6
"""Buckets of the history."""
_PLACES = {field.name: place for place, field in enumerate(fields(TimeBucket))}


@dataclass(frozen=True, slots=True)
class TopOptions:
    url: str
    ca: Path | None
    api_key: str | None
    once: bool


@dataclass(slots=True)
class Shown:
    """What the gateway has told."""

    head: dict[str, Any] = field(default_factory=dict)
    tables: deltas.Tables = field(default_factory=dict)
    problem: str = "asking the gateway"

    def take(self, event: str, data: dict[str, Any]) -> None:
        changes = data.pop("tables")
        self.head, self.problem = data, data["problem"]
        if event == "state":
            self.tables = changes
        else:
            deltas.apply(self.tables, changes)


def top(options: TopOptions) -> None:
    """Shows it until q is pressed. Raises Unavailable where nobody answers, Unauthenticated where a key is wanted."""
    console = Console()
    if options.once or not (sys.stdin.isatty() and console.is_terminal):
        console.print(rendered(asyncio.run(_state(options)), console.width, None))
        return
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(options, console))


async def _state(options: TopOptions) -> Shown:
    async with _client(options) as client:
        try:
            answer = await client.get("/console/state")
        except httpx.HTTPError as error:
            raise calls.connection_failed(client.base_url, error) from None
    if not answer.is_success:
        raise calls.error_of(answer)
    shown = Shown()
    shown.take("state", answer.json())
    return shown


def _client(options: TopOptions) -> httpx.AsyncClient:
    timeout = httpx.Timeout(_SILENT_S, connect=calls.CONNECT_TIMEOUT_S)
    headers, verify = calls.headers(options.api_key), calls.verification(options.ca)
    return httpx.AsyncClient(base_url=options.url, timeout=timeout, headers=headers, verify=verify)


async def _watch(options: TopOptions, console: Console) -> None:
    shown, changed = Shown(), asyncio.Event()
    with Live(console=console, screen=True, auto_refresh=False) as live, _keys() as quit_pressed:
        await first_of(_follow(options, shown, changed), _draw(live, console, shown, changed), quit_pressed.wait())


async def _follow(options: TopOptions, shown: Shown, changed: asyncio.Event) -> None:
    while True:
        try:
            async with _client(options) as client, client.stream("GET", "/console/events") as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise calls.error_of(answer)
                async for event, data in _events(answer):
                    shown.take(event, data)
                    changed.set()
            shown.problem = "the gateway has ended the connection"
        except Unauthenticated:
            raise
        except SpringtideError as error:
            shown.problem = error.message
        except httpx.HTTPError as error:
            shown.problem = f"the gateway at {options.url} cannot be reached ({str(error) or type(error).__name__})"
        changed.set()
        await asyncio.sleep(_AGAIN_S)


async def _events(answer: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    event = ""
    async for line in answer.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "event":
            event = value
        elif name == "data":
            yield event, json.loads(value)


async def _draw(live: Live, console: Console, shown: Shown, changed: asyncio.Event) -> None:
    """With every change, and when the terminal has another size."""
    while True:
        live.update(rendered(shown, console.width, console.height), refresh=True)
        changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await changed.wait()


@contextlib.contextmanager
def _keys() -> Iterator[asyncio.Event]:
    """Set when q is pressed. The terminal is as it was afterwards."""
    pressed, loop, terminal = asyncio.Event(), asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        if (typed := os.read(terminal, 64)) in (b"", b"\x04") or b"q" in typed.lower():
            pressed.set()

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    try:
        yield pressed
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


# ---- what is shown ----


def rendered(shown: Shown, width: int, height: int | None) -> RenderableType:
    """All of it in so many columns and lines; in as many as it takes without `height`."""
    head = shown.head
    if "pools" not in head:
        return Text.assemble(("springtide top", "bold"), f"\n\n{shown.problem or 'nothing has been heard of the Conductor yet'}")
    parts: list[RenderableType] = [_title(shown), _rates(shown, width), _pools(head)]
    left = None if height is None else height - 11
    instances = sorted(shown.tables["instances"].items(), key=lambda entry: (entry[1][READY], -entry[1][LOAD]))
    attempts = sorted(shown.tables["attempts"].items(), key=lambda entry: entry[1]["at"])
    refusals = sorted(shown.tables["refusals"].items(), key=lambda entry: -entry[1]["at"])
    if left is None:
        rooms = [20, 20, 5]
    else:
        of_refusals = min(3, len(refusals), max(0, left // 6))
        of_attempts = min(len(attempts), max(0, left - of_refusals) // 2)
        rooms = [max(0, left - of_refusals - of_attempts), of_attempts, of_refusals]
    parts.append(_instances(instances, rooms[0], width))
    parts.append(_attempts(attempts, rooms[1], head, width))
    if rooms[2]:
        parts.append(_refusals(refusals, rooms[2]))
    return Group(*parts)


def _title(shown: Shown) -> Text:
    head = shown.head
    if shown.problem:
        state = (f"not up to date: {shown.problem}", "bold red")
    elif not head["ready"]:
        state = ("takes no requests", "bold red")
    else:
        state = ("ready", "bold green")
    age = f", {time.strftime('%H:%M:%S', time.localtime(head['taken_at']))}" if head["taken_at"] else ""
    in_flight = f"{head['attempts']} in flight, {head['attempts_in_prefill']} before the first token"
    return Text.assemble((head["model"], "bold"), "  ", state, (f"{age}  {in_flight}", "dim"), no_wrap=True, overflow="ellipsis")


def _rates(shown: Shown, width: int) -> Table:
    """The last minute in figures, and the last hour as a line of blocks."""
    buckets = [shown.tables["history"][key] for key in sorted(shown.tables["history"], key=int)][:-1]
    minute, head = buckets[-_MINUTE:], shown.head
    seconds = max(1, len(minute)) * BUCKET_S
    first, prompt = (_sum(minute, name) for name in ("first_tokens", "prompt_tokens"))
    rows = [
        ("requests/s", f"{_sum(minute, 'placed') / seconds:.1f}", f"{_sum(minute, 'refused')} refused in the last minute", "placed"),
        ("first token", _ms(_typical(minute, "ttft_p50_ms", "first_tokens")), f"objective {_ms(head['ttft_slo_ms'])}", "ttft_p50_ms"),
        ("between tokens", _ms(_typical(minute, "tbt_p50_ms", "finished")), f"objective {_ms(head['tbt_slo_ms'])}", "tbt_p50_ms"),
        ("prompt reused", _share(_sum(minute, "cached_tokens") / prompt) if prompt else "-", f"{first} first tokens", "cached_tokens"),
    ]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True, min_width=8)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="cyan", no_wrap=True)
    room = max(0, width - 60)
    for name, figure, note, series in rows:
        table.add_row(name, figure, note, _line([bucket[_PLACES[series]] for bucket in buckets], room))
    return table


def _pools(head: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("pool", no_wrap=True)
    for name in ("ready", "load", "highest", "running", "waiting", "KV memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for role in Role:
        pool = head["pools"][role.value]
        ready = Text(f"{pool['ready']} of {pool['instances']}", style="" if pool["ready"] == pool["instances"] else "red")
        used = _share(pool["slots_used"] / pool["slots"]) if pool["slots"] else "-"
        load = _share(pool["load"]["mean"]), _share(pool["load"]["max"])
        table.add_row(role.value, ready, *load, str(pool["running"]), str(pool["waiting"]), used)
    return table


def _instances(rows: Sequence[tuple[str, Any]], room: int, width: int) -> Table:
    table = _table("busiest instances", "state", width)
    for name in ("load", "running", "waiting", "queue/step", "KV memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in rows[:room]:
        state = (
            Text("ready", style="green") if row[READY] else Text(f"silent {row[SILENT_S]} s" if row[SILENT_S] else "not ready", style="red")
        )
        load = Text(_share(row[LOAD]), style="red" if row[LOAD] > 1 else "yellow" if row[LOAD] > 0.75 else "")
        running = f"{row[RUNNING]} + {row[IDLE]} idle" if row[IDLE] else str(row[RUNNING])
        pace = _ms(row[QUEUE_MS] if row[ROLE] == Role.PREFILL.value else row[STEP_MS])
        used = _share(row[SLOTS_USED] / row[SLOTS]) if row[SLOTS] else "-"
        table.add_row(name, state, load, running, str(row[WAITING]), pace, used)
    return table


def _attempts(rows: Sequence[tuple[str, Any]], room: int, head: dict[str, Any], width: int) -> Table:
    table = _table("oldest in flight", "path", width)
    for name in ("tokens", "for", "first token"):
        table.add_column(name, justify="right", no_wrap=True)
    now = head["taken_at"]
    for _, row in rows[:room]:
        prefill = engine_of(row["prefill"])
        path = f"{prefill} alone" if prefill == row["decode"] else f"{prefill} → {row['decode']}"
        predicted = row["predicted"]["ttft_ms"] if row["predicted"] else 0
        waited = 1000 * (now - row["at"])
        if row["first"]:
            came = Text(f"after {_ms(1000 * (row['first'] - row['at']))}, {_ms(predicted)} predicted", style="dim")
        elif predicted and waited > predicted + 50:
            came = Text(f"{_ms(waited - predicted)} late", style="yellow")
        else:
            came = Text(f"due in {_ms(max(0.0, predicted - waited))}")
        table.add_row(row["request"], path, str(row["tokens"]), f"{max(0.0, now - row['at']):.1f} s", came)
    return table


def _refusals(rows: Sequence[tuple[str, Any]], room: int) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for number, (_, row) in enumerate(rows[:room]):
        when = time.strftime("%H:%M:%S", time.localtime(row["at"]))
        text.append(f"{chr(10) if number else ''}refused at {when}: ", style="yellow")
        text.append(f"{row['message']} ({row['request']})")
    return text


def _table(first: str, second: str, width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, width=width)
    table.add_column(first, no_wrap=True, ratio=3, overflow="ellipsis")
    table.add_column(second, no_wrap=True, ratio=2, overflow="ellipsis")
    return table


def _sum(buckets: Sequence[Sequence[float]], name: str) -> float:
    return sum(bucket[_PLACES[name]] for bucket in buckets)


def _typical(buckets: Sequence[Sequence[float]], name: str, weight: str) -> float | None:
    total = _sum(buckets, weight)
    return sum(bucket[_PLACES[name]] * bucket[_PLACES[weight]] for bucket in buckets) / total if total else None


def _line(values: Sequence[float], room: int) -> str:
    """The latest at the right; several that share a place are shown by the highest."""
    if not values or room < 8:
        return ""
    together = -(-MOST_BUCKETS // room)
    groups = [max(values[max(0, end - together) : end]) for end in range(len(values), 0, -together)][::-1]
    most = max(groups)
    return "".join(_LINES[round(value / most * (len(_LINES) - 1))] if most else _LINES[0] for value in groups)[-room:]


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _share(value: float) -> str:
    return f"{value:.0%}"
