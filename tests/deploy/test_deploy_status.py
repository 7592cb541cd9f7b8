"""What `springtide status` says of the engines."""

from __future__ import annotations

import io

from rich.console import Console

from deploy.commands.status import instances_table, kernels
from springtide.ids import InstanceId, NodeId
from springtide.membership import Member, MemberRole
from springtide.protocol.instances import InstanceRef, Role
from springtide.protocol.status import InstanceStatus


def member(role: MemberRole, name: str, **details: str) -> Member:
    return Member(role, name, 1, "127.0.0.1:1", name, details=details)


def test_what_models_are_computed_with_is_told_once_where_it_is_the_same_everywhere() -> None:
    engines = [member("prefill", "prefill-0", kernels="torch"), member("decode", "decode-0", kernels="torch")]
    assert kernels([*engines, member("store", "decode-0"), member("conductor", "conductor-0")]) == "torch"


def test_where_engines_differ_it_is_told_whose_is_what() -> None:
    slow = [member("decode", f"decode-{number}", kernels="torch") for number in range(12)]
    said = kernels([member("prefill", "prefill-0", kernels="native AVX-512 bfloat16"), *slow[:2]])
    assert said == "native AVX-512 bfloat16 at prefill-0; torch at decode-0, decode-1"
    assert kernels([member("prefill", "prefill-0"), *slow]).endswith("decode-6, decode-7 and others")


def test_a_cluster_without_engines_has_nothing_to_tell() -> None:
    assert kernels([member("conductor", "conductor-0")]) == "no engine is there"


def test_both_roles_of_a_node_are_beside_one_another() -> None:
    names = {"instance-0": Role.DECODE, "instance-1": Role.DECODE, "instance-0.prefill": Role.PREFILL, "instance-1.prefill": Role.PREFILL}
    nodes = {name: NodeId(name.removesuffix(".prefill")) for name in names}
    refs = [InstanceRef(InstanceId(name), role, "a:1", nodes[name], "a:2") for name, role in names.items()]
    instances = [InstanceStatus(ref, True, 1, 0, 0, 0.0, 0.0, 10, 10, 0, 0.1) for ref in refs]
    printed = io.StringIO()
    Console(file=printed, width=200).print(instances_table([member("store", node) for node in nodes.values()], instances))
    first = [line.split()[0] for line in printed.getvalue().splitlines() if "ready" in line]
    assert first == ["instance-0", "instance-0.prefill", "instance-1", "instance-1.prefill"]
