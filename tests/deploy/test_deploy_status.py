"""What `springtide status` says of the engines."""

from __future__ import annotations

from deploy.commands.status import kernels
from springtide.membership import Member, MemberRole


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
