"""A cluster of several machines, each of them joined by one command: here at addresses of its own on loopback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from deploy.ca.authority import Authority
from springtide.config import TlsConfig
from tests.support import streams
from tests.support.cluster import Cluster, cached_blocks, evict_all, metric_at
from tests.support.generate import generate
from tests.support.joined import JoinedNode, new_token, ready
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE
from tests.support.reference import Reference, random_prompt

OUTPUT_TOKENS = 24
LONG = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference.from_directory(model)


@pytest.fixture(scope="module")
def head(model: Path) -> Iterator[Cluster]:
    """Without an engine of its own."""
    kv = {"block_tokens": 16, "arena_size": "64MiB", "transports": ["tcp"]}
    settings: dict[str, Any] = {"model": str(model), "served_model_name": "joined", "dtype": "float32", "device": "cpu"}
    # Of four streams not all fit on one node.
    settings["decode_node"] = {"max_batch": 3}
    settings["profile"] = TINY_PROFILE
    with Cluster(
        **settings, kv=kv, prefill=0, decode=0, join_port=0, valkey_port=0, conductor={"admission": "baseline", "leader_lease_s": 1.0}
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def nodes(head: Cluster) -> Iterator[dict[str, JoinedNode]]:
    with JoinedNode(head, "prefill", "127.0.0.2") as prefill, JoinedNode(head, "decode", "127.0.0.3") as decode:
        head.wait_until(lambda: ready(head.url), "the cluster to take requests")
        yield {"prefill": prefill, "decode": decode}


def prompt_of(seed: int, length: int = 100) -> list[int]:
    return random_prompt(seed, length, 10, 250)


def test_machines_that_have_joined_answer_as_transformers_do(head: Cluster, nodes: dict[str, JoinedNode], reference: Reference) -> None:
    prompt = prompt_of(1, 300)
    wanted = reference.greedy(prompt, OUTPUT_TOKENS)
    cold, cached = (generate(head.grpc_address, "joined", prompt, OUTPUT_TOKENS) for _ in range(2))
    assert cold.token_ids == cached.token_ids == wanted
    assert (cold.cached_tokens, cached.cached_tokens) == (0, 288)
    addresses = {member.member_id: member.address.partition(":")[0] for member in head.members() if member.role in ("prefill", "decode")}
    assert addresses == {"prefill-2": "127.0.0.2", "decode-3": "127.0.0.3"}
    assert "is in the cluster 'springtide' as a store and a decode engine, at 127.0.0.3" in nodes["decode"].log


def test_who_has_no_token_that_holds_is_told_so_and_starts_nothing(head: Cluster) -> None:
    token, join = new_token(head, "1s")
    other = token[:-64] + "0" * 64
    head.wait_until(lambda: refusal(join, token) is not None, "the token to expire")
    assert "the token is unknown here: it has expired" in str(refusal(join, token))
    assert "is not of the cluster that the token was made for" in str(refusal(join, other))
    assert "does not answer" in str(refusal("127.0.0.1:1", token))


def refusal(join: str, token: str) -> str | None:
    """What `springtide node` says when it is not let in; None when it is."""
    command = [sys.executable, "-m", "deploy.cli", "node", "store", "--join", join, "--token", token, "--name", "nobody"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            said, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.communicate()
            return None
    return " ".join(said.split()) if process.returncode == 1 else None


def test_a_node_that_is_told_to_leave_ends_what_it_has_and_another_takes_its_place(
    head: Cluster, nodes: dict[str, JoinedNode], reference: Reference
) -> None:
    """Streams that run there move where there is room, or go on to their ends; others are served elsewhere; nobody sees an error."""
    begun = Event()
    with JoinedNode(head, "decode", "127.0.0.4", "--drain", "120") as leaving, ThreadPoolExecutor(6) as threads:
        head.wait_until(lambda: len(head.ready_instances()) == 3, "the Conductor to know it")
        running = [threads.submit(streams.stream, head, prompt_of(seed), LONG, begun.set) for seed in range(10, 14)]
        assert begun.wait(60)
        head.wait_until(lambda: num_running(head, leaving.name) > 0, "something to run there")
        leaving.terminate()
        head.wait_until(lambda: leaving.name not in head.ready_instances(), "the Conductor to know that it leaves")
        after = threads.submit(generate, head.grpc_address, "joined", prompt_of(20), OUTPUT_TOKENS)
        ends = [each.result() for each in running]
        assert after.result().token_ids == reference.greedy(prompt_of(20), OUTPUT_TOKENS)
        assert all(end.finish_reasons == ("length",) and not end.errors and end.tokens == LONG for end in ends)
        assert leaving.process.wait(60) == 0
        assert "has not ended all its work" not in leaving.log
    assert head.ready_instances() == {"prefill-2", "decode-3"}


def test_what_runs_at_a_node_that_is_told_to_leave_moves_to_others_that_have_room(
    head: Cluster, nodes: dict[str, JoinedNode], reference: Reference
) -> None:
    """It leaves long before the streams, one of which runs there, have come to their ends."""
    moved = head.metric("gateway-0", "springtide_gateway_moves_total", labels={"outcome": "moved"})
    long = 1500
    with JoinedNode(head, "decode", "127.0.0.4", "--drain", "300") as leaving, ThreadPoolExecutor(2) as threads:
        head.wait_until(lambda: len(head.ready_instances()) == 3, "the Conductor to know it")
        running = [threads.submit(generate, head.grpc_address, "joined", prompt_of(seed), long, timeout_s=300) for seed in (15, 16)]
        head.wait_until(lambda: num_running(head, leaving.name) > 0, "one to run there")
        leaving.terminate()
        assert leaving.process.wait(120) == 0
        assert not any(each.done() for each in running)
        assert [each.result().token_ids for each in running] == [reference.greedy(prompt_of(seed), long) for seed in (15, 16)]
    assert head.metric("gateway-0", "springtide_gateway_moves_total", labels={"outcome": "moved"}) > moved


def num_running(head: Cluster, name: str) -> int:
    return next(instance.running for instance in head.status().instances if instance.instance.instance_id == name)


def test_a_node_may_have_the_name_of_one_that_is_gone(head: Cluster, nodes: dict[str, JoinedNode]) -> None:
    with JoinedNode(head, "store", "127.0.0.5") as first:
        first.kill()
    with JoinedNode(head, "store", "127.0.0.5") as second:
        assert any(member.member_id == second.name for member in head.members())


def test_a_further_gateway_and_a_further_conductor_serve_when_the_heads_are_gone(
    head: Cluster, nodes: dict[str, JoinedNode], reference: Reference
) -> None:
    free = ("--port", "0", "--grpc-port", "0", "--drain", "120")
    with JoinedNode(head, "gateway", "127.0.0.6", *free) as gateway, JoinedNode(head, "conductor", "127.0.0.7") as conductor:
        head.wait_until(lambda: ready(gateway.url), "the second gateway to be ready")
        wanted = reference.greedy(prompt_of(30), OUTPUT_TOKENS)
        assert generate(gateway.record.grpc_address, "joined", prompt_of(30), OUTPUT_TOKENS).token_ids == wanted
        head.kill("conductor-0")
        head.kill("gateway-0")
        assert generate(gateway.record.grpc_address, "joined", prompt_of(31), OUTPUT_TOKENS).token_ids == reference.greedy(
            prompt_of(31), OUTPUT_TOKENS
        )
        assert any(member.member_id == conductor.name for member in head.members())
    head.wait_until(lambda: ready(head.url), "the head's own to serve again")


def test_a_machine_is_revoked_under_load_and_the_others_leave_it_behind(
    head: Cluster, nodes: dict[str, JoinedNode], reference: Reference
) -> None:
    """What it had goes on elsewhere, it does not come back, and what was signed for it is worth nothing after a rotation."""
    begun = Event()
    with JoinedNode(head, "decode", "127.0.0.8") as stolen, ThreadPoolExecutor(6) as threads:
        head.wait_until(lambda: stolen.name in head.ready_instances(), "the Conductor to know it")
        running = [threads.submit(streams.stream, head, prompt_of(seed), LONG, begun.set) for seed in range(50, 54)]
        assert begun.wait(60)
        head.wait_until(lambda: num_running(head, stolen.name) > 0, "something to run there")
        ca(head, "revoke", stolen.name)
        head.wait_until(lambda: stolen.name not in head.ready_instances(), "it to be gone from the cluster")
        ends = [each.result() for each in running]
        assert all(end.finish_reasons == ("length",) and not end.errors and end.tokens == LONG for end in ends)
        before = Path(stolen.record.tls["certificate"]).read_bytes()
        ca(head, "rotate")
        bundle = Authority.open(Path(head.record.ca_dir)).bundle
        places = [Path(record.tls["ca"]) for record in (head.record, *(node.record for node in nodes.values()))]
        head.wait_until(lambda: all(place.read_bytes() == bundle for place in places), "every other machine to have followed")
        ca(head, "retire")
        head.wait_until(lambda: "the certificate of this machine cannot be renewed now" in stolen.logs(), "it to be refused")
        assert Path(stolen.record.tls["certificate"]).read_bytes() == before
        assert Authority.open(Path(head.record.ca_dir)).vouches_for(before) is None
        assert generate(head.grpc_address, "joined", prompt_of(60), OUTPUT_TOKENS).token_ids == reference.greedy(
            prompt_of(60), OUTPUT_TOKENS
        )
        assert head.ready_instances() == {"prefill-2", "decode-3"}
        stolen.kill()


def ca(head: Cluster, command: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "deploy.cli", "ca", command, *arguments, "--dir", head.record.ca_dir], check=True)


def test_a_store_alone_has_what_is_popular_when_those_are_gone_who_computed_it(
    head: Cluster, nodes: dict[str, JoinedNode], reference: Reference
) -> None:
    prompt = prompt_of(70, 300)
    wanted = reference.greedy(prompt, OUTPUT_TOKENS)
    with JoinedNode(head, "store", "127.0.0.9") as store, JoinedNode(head, "prefill", "127.0.0.10") as other:
        head.wait_until(lambda: other.name in head.ready_instances(), "the Conductor to know it")
        for _ in range(12):
            assert generate(head.grpc_address, "joined", prompt, OUTPUT_TOKENS).token_ids == wanted
        head.wait_until(lambda: num_replicated(head, store) == 18, "the store to have its copy")
        other.kill()
        head.wait_until(lambda: other.name not in head.ready_instances(), "the prefill node to be gone")
        for node in nodes.values():
            evict_all(Path(node.record.run_dir, f"{node.name}.store.sock"))
        head.wait_until(lambda: not any(cached_blocks(head.status(), node.name) for node in nodes.values()), "their blocks to be gone")
        answer = generate(head.grpc_address, "joined", prompt, OUTPUT_TOKENS)
        assert (answer.token_ids, answer.cached_tokens) == (wanted, 288)


def num_replicated(head: Cluster, store: JoinedNode) -> float:
    address = next(member.metrics_address for member in head.members() if member.member_id == store.name)
    return metric_at(address, "springtide_store_replicated_blocks_total", None, TlsConfig.model_validate(head.record.tls))


def test_machines_follow_a_rotated_authority_by_themselves(head: Cluster, nodes: dict[str, JoinedNode], reference: Reference) -> None:
    """And then the old one can go, while requests go on."""
    authority = Authority.open(Path(head.record.ca_dir))

    def follow(bundle: bytes) -> None:
        places = [Path(record.tls["ca"]) for record in (head.record, *(node.record for node in nodes.values()))]
        head.wait_until(lambda: all(place.read_bytes() == bundle for place in places), "every machine to have followed")
        assert generate(head.grpc_address, "joined", prompt_of(40), OUTPUT_TOKENS).token_ids == reference.greedy(
            prompt_of(40), OUTPUT_TOKENS
        )

    before = {name: Path(node.record.tls["certificate"]).read_bytes() for name, node in nodes.items()}
    follow(authority.rotate().bundle)
    follow(Authority.open(authority.directory).retire().bundle)
    for name, node in nodes.items():
        assert Path(node.record.tls["certificate"]).read_bytes() != before[name]
    head.kill("conductor-0")
    head.wait_until(lambda: ready(head.url) and head.ready_instances() == {"prefill-2", "decode-3"}, "a new Conductor to find everybody")
    assert generate(head.grpc_address, "joined", prompt_of(41), OUTPUT_TOKENS).token_ids == reference.greedy(prompt_of(41), OUTPUT_TOKENS)
