"""Each row of "What happens when something dies" (docs/operations.md): SHOWN_BY names the tests that show it, those here and elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import httpx
import pytest

from tests.support.cluster import Cluster
from tests.support.generate import generate
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE
from tests.support.reference import random_prompt

TESTS = Path(__file__).parents[1]
SECTION = "## What happens when something dies"
SHOWN_BY = {
    "prefill or decode engine": (
        "e2e/test_failure.py::test_no_request_is_lost_when_a_process_is_killed",
        "e2e/test_exactness.py::test_a_node_killed_half_way_changes_no_token",
        "e2e/test_exactness.py::test_seeded_sampling_survives_a_reschedule",
        "e2e/test_what_dies.py::test_an_engine_that_dies_leaves_the_pool_to_its_successor",
    ),
    "store": (
        "e2e/test_failure.py::test_no_request_is_lost_when_a_process_is_killed",
        "e2e/test_exactness.py::test_a_prefix_that_lies_on_another_node_gives_the_same_answer",
        "e2e/test_what_dies.py::test_a_store_that_dies_takes_its_blocks_and_not_its_engine",
    ),
    "Conductor": (
        "e2e/test_failure.py::test_no_request_is_lost_when_a_process_is_killed",
        "conductor/test_conductor_server.py::test_a_restarted_conductor_finds_everything_again",
        "e2e/test_what_dies.py::test_a_conductor_that_dies_keeps_new_requests_waiting_and_learns_everything_anew",
        "e2e/test_what_dies.py::test_a_gateway_in_the_conductors_process_dies_with_it",
    ),
    "leader of several Conductors": (
        "e2e/test_conductor_ha.py::test_a_killed_leader_costs_no_request",
        "conductor/test_conductor_ha_servers.py::test_standbys_know_every_attempt_from_its_placement_to_its_end",
    ),
    "Valkey": (
        "e2e/test_failure.py::test_no_request_is_lost_when_a_process_is_killed",
        "e2e/test_conductor_ha.py::test_a_valkey_that_comes_back_empty_costs_no_request",
        "conductor/test_conductor_ha_servers.py::test_without_valkey_the_leader_stops_with_its_lease_and_goes_on_when_valkey_is_back",
        "conductor/test_conductor_server.py::test_a_valkey_that_dies_and_comes_back_empty_costs_no_instance",
        "e2e/test_what_dies.py::test_a_valkey_that_dies_is_missed_by_nobody_and_told_of_everybody_again",
        "e2e/test_sentinels.py::test_a_master_that_dies_with_a_sentinel_costs_no_request_and_its_replica_is_told_of_everybody_again",
    ),
    "gateway": (
        "e2e/test_failure.py::test_a_killed_gateway_leaves_nothing_running",
        "e2e/test_two_gateways.py::test_one_is_killed_and_the_other_goes_on",
    ),
}
LONG_OUTPUT, OUTPUT_TOKENS = 8000, 8
"""The long one is not read to its end: it is what the context has room for, and on any machine longer than what is done meanwhile."""
SLOTS, CACHED = "springtide_store_slots", {"tier": "dram", "state": "cached"}


def test_every_row_is_shown_by_tests_that_there_are() -> None:
    _, _, section = (TESTS.parent / "docs" / "operations.md").read_text().partition(SECTION)
    table = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in table[1:]] == list(SHOWN_BY)
    for test in {test for tests in SHOWN_BY.values() for test in tests}:
        path, _, name = test.partition("::")
        functions = [
            node for node in ast.parse((TESTS / path).read_text()).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        assert name in {function.name for function in functions}, test


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 8, "max_position_embeddings": 8192}
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", **shape)


def new_cluster(model: Path, *, separate_gateway: bool) -> Cluster:
    return Cluster(
        model=str(model),
        dtype="float32",
        profile=TINY_PROFILE,
        server={"separate_gateway": separate_gateway},
        kv={"arena_size": "256MiB"},
        conductor={"admission": "baseline"},
    )


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    with new_cluster(model, separate_gateway=True) as cluster:
        yield cluster


def prompt_of(seed: int, length: int = 640) -> list[int]:
    return random_prompt(seed, length, 10, 250)


def ask(cluster: Cluster, prompt: list[int]) -> int:
    """How many of its tokens were cached."""
    answer = generate(cluster.grpc_address, cluster.model, prompt, OUTPUT_TOKENS)
    assert len(answer.token_ids) == OUTPUT_TOKENS
    return answer.cached_tokens


@pytest.mark.parametrize("engine", ["prefill-0", "decode-0"])
def test_an_engine_that_dies_leaves_the_pool_to_its_successor(cluster: Cluster, engine: str) -> None:
    prompt = prompt_of(sum(engine.encode()))
    assert ask(cluster, prompt) == 0
    store = cluster.pid_of(f"{engine}-store")
    cluster.wait_metric(f"{engine}-store", SLOTS, lambda slots: slots >= 10, labels=CACHED)

    cluster.kill(engine)
    cluster.wait_ready(restarted=engine)

    assert cluster.pid_of(f"{engine}-store") == store
    assert cluster.metric(f"{engine}-store", SLOTS, CACHED) >= 10
    assert ask(cluster, prompt) == 576


@pytest.mark.parametrize("node", ["prefill-0", "decode-0"])
def test_a_store_that_dies_takes_its_blocks_and_not_its_engine(cluster: Cluster, node: str) -> None:
    ask(cluster, prompt_of(2))
    engine = cluster.pid_of(node)
    cluster.wait_metric(f"{node}-store", SLOTS, lambda slots: slots >= 10, labels=CACHED)

    cluster.kill(f"{node}-store")
    cluster.wait_ready(restarted=f"{node}-store")

    assert cluster.metric(f"{node}-store", SLOTS, CACHED) == 0
    assert cluster.pid_of(node) == engine
    ask(cluster, prompt_of(3))
    cluster.wait_metric(f"{node}-store", SLOTS, lambda slots: slots >= 10, labels=CACHED)


def test_a_conductor_that_dies_keeps_new_requests_waiting_and_learns_everything_anew(cluster: Cluster) -> None:
    prompt, long_prompt, begun, enough = prompt_of(4), prompt_of(5, 100), Event(), Event()
    ask(cluster, prompt)
    with ThreadPoolExecutor(2) as threads:
        streaming = threads.submit(
            generate, cluster.grpc_address, cluster.model, long_prompt, LONG_OUTPUT, on_token=lambda count: begun.set(), until=enough
        )
        assert begun.wait(60)
        cluster.kill("conductor-0")
        assert threads.submit(ask, cluster, prompt).result() == 576, "it waits, and is served"
        cluster.wait_ready(restarted="conductor-0")
        cluster.wait_until(lambda: cluster.status().index_blocks >= 10, "the Conductor to know what the stores hold")
        cluster.wait_until(
            lambda: cluster.status().attempts_live == 1 and not streaming.done(), "the Conductor to know of the stream while it goes on"
        )
        enough.set()
        tokens = streaming.result().token_ids
    assert tokens == generate(cluster.grpc_address, cluster.model, long_prompt, len(tokens)).token_ids


def test_a_valkey_that_dies_is_missed_by_nobody_and_told_of_everybody_again(cluster: Cluster) -> None:
    everybody = {(member.role, member.member_id, member.incarnation) for member in cluster.members()}

    cluster.kill("valkey")

    assert ask(cluster, prompt_of(6)) == 0
    cluster.wait_ready(restarted="valkey")
    cluster.wait_until(
        lambda: {(member.role, member.member_id, member.incarnation) for member in cluster.members()} == everybody,
        "the same members to be announced",
    )


def test_a_gateway_in_the_conductors_process_dies_with_it(model: Path) -> None:
    with new_cluster(model, separate_gateway=False) as cluster:
        request = {"model": cluster.model, "prompt": prompt_of(7, 100), "max_tokens": LONG_OUTPUT, "ignore_eos": True, "stream": True}
        with (
            pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)),
            httpx.stream("POST", f"{cluster.url}/v1/completions", json=request, timeout=60) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            cluster.kill("conductor-0")
            for _ in lines:
                pass
        cluster.wait_ready(restarted="conductor-0")
        for node in ("prefill-0", "decode-0"):
            cluster.wait_metric(f"{node}-store", SLOTS, lambda slots: slots == 0, labels={"state": "in_use"})
        ask(cluster, prompt_of(8))
