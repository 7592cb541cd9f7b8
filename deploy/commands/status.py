"""`springtide status`: what the Conductor knows of its cluster, as a table."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from deploy.commands.conductors import View, cluster_status, leadership, views
from deploy.commands.locate import Where, locate, without_password
from springtide.errors import Unavailable
from springtide.membership import Member
from springtide.protocol.instances import Role
from springtide.protocol.status import ClusterStatus, InstanceStatus

_MOST_NAMED = 8


def status(where: Where, *, predictions: bool = False) -> None:
    """Prints it, or how good the recent predictions were. Raises Unavailable when there is no such cluster or its Conductor does not
    answer."""
    members, found = asyncio.run(_ask(where))
    reply = cluster_status(found)
    console = Console()
    if predictions:
        console.print(_predictions(reply) if reply.predictions else "no request has ended yet since this Conductor started")
        return
    console.print(_summary(reply), highlight=False)
    console.print(f"conductor: {leadership(found)}", highlight=False)
    console.print(f"kernels: {kernels(members)}", highlight=False)
    console.print(instances_table(members, reply.instances))


def kernels(members: Sequence[Member]) -> str:
    """What the engines compute with; whose is what where they differ."""
    names: dict[str, list[str]] = {}
    for member in members:
        if member.role in tuple(Role):
            names.setdefault(member.details.get("kernels", "not told"), []).append(member.member_id)
    if len(names) < 2:
        return next(iter(names), "no engine is there")
    return "; ".join(f"{kind} at {', '.join(at[:_MOST_NAMED])}{' and others' if at[_MOST_NAMED:] else ''}" for kind, at in names.items())


async def _ask(where: Where) -> tuple[Sequence[Member], Sequence[View]]:
    located = await locate(where)
    found = await views(located.members, located.credentials)
    if not found:
        raise Unavailable(f"cluster {located.cluster!r} at {without_password(located.redis_url)} has no Conductor just now")
    return located.members, found


def _summary(reply: ClusterStatus) -> str:
    hit_rate = reply.cached_tokens / reply.prompt_tokens if reply.prompt_tokens else 0.0
    rejected = ", ".join(f"{reason} {count}" for reason, count in sorted(reply.rejections_by_reason.items()))
    return (
        f"[bold]{reply.model}[/bold]: {'[green]ready' if reply.ready else '[red]not ready'}[/]\n"
        f"requests: {reply.requests_scheduled} scheduled, {reply.requests_rejected} rejected{f' ({rejected})' if rejected else ''}, "
        f"{reply.attempts_live} running\n"
        f"load: prefill {reply.prefill_load:.0%}, decode {reply.decode_load:.0%} of what the objectives allow\n"
        f"prompt tokens: {reply.prompt_tokens}, of which cached {reply.cached_tokens} (hit rate {hit_rate:.1%}); "
        f"{reply.index_blocks} blocks in the prefix index{_pools(reply)}"
    )


def _pools(reply: ClusterStatus) -> str:
    """The ratio that the demand asks for, as far as it is known; and who has another role than its name says, or soon will."""
    ready = sum(instance.ready for instance in reply.instances)
    parts = [f"{reply.wanted_prefill} prefill, {ready - reply.wanted_prefill} decode wanted"] if reply.wanted_prefill is not None else []
    for instance in reply.instances:
        name, role = instance.instance.instance_id, instance.instance.role
        if name.startswith(f"{role.other}-"):
            parts.append(f"{name} serves as {role}")
    if reply.switching_instance_id:
        parts.append(f"{reply.switching_instance_id} is switching")
    return f"\npools: {'; '.join(parts)}" if parts else ""


def instances_table(members: Sequence[Member], instances: Sequence[InstanceStatus]) -> Table:
    """A row for each, those of one node one after the other."""
    stores = {member.node_id or member.member_id for member in members if member.role == "store"}
    table = Table(box=box.SIMPLE, padding=0)
    for name in ("instance", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("running", "waiting", "queue", "step", "slots used", "cached"):
        table.add_column(name, justify="right", no_wrap=True)
    places = {instance.instance.node_id: place for place, instance in reversed([*enumerate(instances)])}
    for instance in sorted(instances, key=lambda each: places[each.instance.node_id]):
        table.add_row(
            instance.instance.instance_id,
            _state(instance, instance.instance.node_id in stores),
            f"{instance.running} + {instance.idle} idle" if instance.idle else str(instance.running),
            str(instance.waiting),
            f"{instance.queue_ms:.0f} ms",
            f"{instance.step_ms:.1f} ms",
            f"{instance.slots_total - instance.slots_available} of {instance.slots_total}",
            f"{instance.cached_blocks} blocks",
        )
    return table


def _predictions(reply: ClusterStatus) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), caption="of |predicted - actual| / actual; bias: predicted too high (+) or low (-)")
    table.add_column("predicted", no_wrap=True)
    for name in ("recent", "median error", "p90 error", "bias"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in reply.predictions:
        name = row.quantity.replace("_", " ")
        table.add_row(name, str(row.count), f"{row.median_error:.1%}", f"{row.p90_error:.1%}", f"{row.bias:+.1%}")
    return table


def _state(instance: InstanceStatus, has_store: bool) -> str:
    if not has_store:
        return "[red]store gone"
    return "[green]ready" if instance.ready else f"[red]silent {instance.seconds_since_report:.0f} s"
