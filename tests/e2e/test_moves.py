"""Sequences that move to another decode node while they run: answers are those of the model alone, and nothing is lost or left behind.

`MOVES=1000 pytest tests/e2e/test_moves.py` has more of them (`make test-long`)."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from springtide.rpc import common_pb2
from tests.support.cluster import Cluster
from tests.support.environment import own_environment
from tests.support.generate import generate
from tests.support.models import make_tiny_llama
from tests.support.moves import move, num_moved
from tests.support.profiles import TINY_PROFILE
from tests.support.reference import Reference, random_prompt

DECODES = ("decode-0", "decode-1", "decode-2")
BLOCK_TOKENS = 32
OUTPUT_TOKENS = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", hidden_size=128, intermediate_size=320, num_hidden_layers=4)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference.from_directory(model)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    settings = {"prefill_node": {"threads": 1}, "decode_node": {"threads": 1}, "conductor": {"admission": "baseline"}}
    settings |= {"kv": {"block_tokens": BLOCK_TOKENS}, "server": {"separate_gateway": True}, "profile": TINY_PROFILE}
    with Cluster(model=str(model), dtype="float32", prefill=1, decode=len(DECODES), **settings) as cluster:
        yield cluster


def prompt_of(seed: int, length: int) -> list[int]:
    return random_prompt(seed, length, 10, 250)


class Mover:
    """Has sequences move from one decode node after another, at random, until it is left."""

    def __init__(self, cluster: Cluster, seed: int, pause_s: float) -> None:
        self.ordered = 0
        self._cluster, self._random, self._pause_s = cluster, random.Random(seed), pause_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Mover:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._pause_s * self._random.random()):
            self.ordered += move(self._cluster, self._random.choice(DECODES), 2)


def all_slots_are_back(cluster: Cluster) -> None:
    for name in DECODES:
        for state in ("in_use", "quarantined"):
            cluster.wait_metric(f"{name}-store", "springtide_store_slots", lambda slots: slots == 0, labels={"state": state})


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
def test_a_sequence_that_moves_again_and_again_goes_on_as_if_it_did_not(cluster: Cluster, reference: Reference, temperature: float) -> None:
    prompt, sampling = prompt_of(1, 500), common_pb2.SamplingParams(temperature=temperature, seed=11)
    wanted = generate(cluster.grpc_address, cluster.model, prompt, OUTPUT_TOKENS, sampling=sampling).token_ids
    if not temperature:
        assert wanted == reference.greedy(prompt, OUTPUT_TOKENS)
    before = num_moved(cluster)
    with Mover(cluster, seed=2, pause_s=0.2):
        while num_moved(cluster) < before + 3:
            assert generate(cluster.grpc_address, cluster.model, prompt, OUTPUT_TOKENS, sampling=sampling).token_ids == wanted
    all_slots_are_back(cluster)
    assert sum(cluster.metric(name, "springtide_decode_foretold_tokens_total") for name in DECODES) > 0, "several came in a step"


def test_an_operator_has_what_runs_at_a_node_move(cluster: Cluster, reference: Reference) -> None:
    prompt, over = prompt_of(3, 200), threading.Event()
    wanted = reference.greedy(prompt, 1200)

    def again_and_again() -> bool:
        while not over.is_set():
            if generate(cluster.grpc_address, cluster.model, prompt, 1200).token_ids != wanted:
                return False
        return True

    before, said = num_moved(cluster), ""
    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(again_and_again) for _ in range(3)]
        names = itertools.cycle(DECODES)
        while num_moved(cluster) == before and not any(one.done() for one in running):
            said += springtide("move", next(names), "--url", cluster.url).stdout
        over.set()
        assert all(one.result() for one in running)
    assert "1 of the sequences at decode-" in said
    assert num_moved(cluster) > before
    wrong = springtide("move", "decode-9", "--url", cluster.url, check=False)
    assert wrong.returncode and "there is no instance 'decode-9'" in " ".join(wrong.stderr.split())


def springtide(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", *arguments]
    return subprocess.run(command, check=check, capture_output=True, text=True, env=own_environment())


def generated(cluster: Cluster, prompt: list[int], on_token: Callable[[int], None] | None = None) -> list[int]:
    return generate(cluster.grpc_address, cluster.model, prompt, OUTPUT_TOKENS, on_token=on_token, timeout_s=300).token_ids


NUM_MOVES = int(os.environ.get("MOVES", "40"))
VICTIMS = ("decode-0", "decode-1-store", "conductor-0", "prefill-0", "decode-2", "decode-0-store")


@pytest.mark.timeout(3600)
def test_nothing_is_lost_or_left_behind_while_many_move_and_some_are_killed(cluster: Cluster) -> None:
    moved, rounds = 0.0, 0
    lengths = {seed: 60 + 90 * (seed % 9) for seed in range(100, 108)}
    # As long as nothing moves they are transformers' (above), who take a minute for all of them.
    wanted = {seed: generated(cluster, prompt_of(seed, length)) for seed, length in lengths.items()}
    while moved < NUM_MOVES:
        killed = threading.Event()
        victim = VICTIMS[rounds % len(VICTIMS)] if rounds % 2 else None

        def answer(seed: int, victim: str | None = victim, killed: threading.Event = killed) -> None:
            def kill_once(so_far: int) -> None:
                if victim is not None and so_far >= OUTPUT_TOKENS // 4 and not killed.is_set():
                    killed.set()
                    cluster.kill(victim)

            got = generated(cluster, prompt_of(seed, lengths[seed]), kill_once)
            assert got == wanted[seed], f"wrong tokens of seed {seed}, with {victim} killed"

        before = num_moved(cluster)
        with Mover(cluster, seed=rounds, pause_s=0.05), ThreadPoolExecutor(8) as threads:
            for end in threads.map(answer, range(100, 108)):
                assert end is None
        moved, rounds = moved + num_moved(cluster) - before, rounds + 1
        if killed.is_set():
            cluster.wait_ready(restarted=victim)
    all_slots_are_back(cluster)
