"""A cluster of several machines whose certificates another authority has made: the join service signs none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.ca.authority import Authority
from deploy.ca.identity import Identity, issue_to
from springtide.config import LOOPBACK
from tests.support.cluster import Cluster
from tests.support.generate import generate
from tests.support.joined import JoinedNode
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE
from tests.support.reference import Reference, random_prompt

DECODE = "127.0.0.2"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority") / "ca", "a company")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def head(authority: Authority, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """With a prefill node of its own."""
    settings: dict[str, Any] = {
        "model": str(model),
        "served_model_name": "given",
        "dtype": "float32",
        "device": "cpu",
        "profile": TINY_PROFILE,
    }
    settings["kv"] = {"block_tokens": 16, "arena_size": "64MiB", "transports": ["tcp"]}
    settings["tls"] = given(authority, tmp_path_factory.mktemp("head"), LOOPBACK, "localhost")
    with Cluster(**settings, prefill=1, decode=0, join_port=0, valkey_port=0, conductor={"admission": "baseline"}) as cluster:
        yield cluster


def given(authority: Authority, directory: Path, *addresses: str) -> dict[str, str]:
    """The settings of a machine that has these addresses, and its files."""
    identity = Identity(directory)
    issue_to(identity, authority, "a machine", addresses)
    return {"certificate": str(identity.certificate), "key": str(identity.key), "ca": str(identity.authorities)}


def options(files: dict[str, str]) -> list[str]:
    return [word for name, path in files.items() for word in ("--set", f"tls.{name}={path}")]


def test_a_machine_joins_with_the_certificate_that_it_was_given(head: Cluster, authority: Authority, model: Path, tmp_path: Path) -> None:
    prompt = random_prompt(1, 300, 10, 250)
    with JoinedNode(head, "decode", DECODE, *options(given(authority, tmp_path, DECODE, "localhost", LOOPBACK))) as decode:
        head.wait_until(lambda: decode.name in head.ready_instances(), "the Conductor to know it")
        assert generate(head.grpc_address, "given", prompt, 24).token_ids == Reference.from_directory(model).greedy(prompt, 24)
        assert not Path(decode.record.run_dir, "tls").exists(), "nothing was signed for it"


def test_a_machine_that_was_given_none_is_told_so(head: Cluster) -> None:
    node = JoinedNode(head, "decode", DECODE)
    try:
        assert node.process.wait(60) == 2
        assert "tls.certificate: this cluster is given its certificates" in " ".join(node.log.split())
    finally:
        node.__exit__(None, None, None)
