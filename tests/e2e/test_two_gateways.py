"""Two gateways before one Conductor: both serve at once, either goes on when the other dies, and what one has learnt the other finds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import httpx
import pytest

from tests.chaos.cluster import ExtraGateway
from tests.support.cluster import Cluster
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE
from tests.support.reference import random_prompt
from tests.support.streams import StreamEnd, stream

GATEWAYS = ("gateway-0", "gateway-1")
STORES = ("prefill-0-store", "decode-0-store")
STREAMS_EACH = 3
OUTPUT_TOKENS, KILLED_TOKENS = 60, 1200
"""Where one is killed, enough that no stream has ended when the last one begins."""
BROKEN = "broken"


def prompt_of(seed: int, length: int) -> list[int]:
    return random_prompt(seed, length, 10, 250)


class TwoGateways:
    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster = cluster
        self.second = ExtraGateway("gateway-1", cluster, directory)

    def url(self, name: str) -> str:
        return self.cluster.url if name == "gateway-0" else self.second.url

    def kill(self, name: str) -> None:
        if name == "gateway-0":
            self.cluster.kill(name)
        else:
            assert self.second.pid is not None
            os.kill(self.second.pid, signal.SIGKILL)

    def wait_revived(self, name: str) -> None:
        """Until it serves again, in another process than the one that was killed."""
        if name == "gateway-0":
            self.cluster.wait_ready(restarted=name)
        else:
            self.cluster.wait_until(lambda: self.second.pid is None, "the gateway's end")
            self.second.revive()
        self.cluster.wait_until(lambda: self._serves(name), f"{name} to serve")

    def _serves(self, name: str) -> bool:
        try:
            return httpx.get(f"{self.url(name)}/ready", timeout=2).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def stream(self, name: str, seed: int, output_tokens: int, begun: Event) -> StreamEnd | str:
        try:
            return stream(self.cluster, prompt_of(seed, 100), output_tokens, begun.set, self.url(name))
        except httpx.HTTPError:
            return BROKEN

    def complete(self, name: str, prompt: list[int], max_tokens: int, tenant: str = "") -> dict:
        body = {"model": self.cluster.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        headers = {"x-springtide-tenant": tenant} if tenant else {}
        answer = httpx.post(f"{self.url(name)}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def cached(self, name: str, prompt: list[int], tenant: str = "") -> int:
        return self.complete(name, prompt, 1, tenant)["usage"]["prompt_tokens_details"]["cached_tokens"]

    def wait_nothing_held(self) -> None:
        for store in STORES:
            for state in ("in_use", "quarantined"):
                self.cluster.wait_metric(store, "springtide_store_slots", lambda slots: slots == 0, labels={"state": state})


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoGateways]:
    shape = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 8}
    model = make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", **shape)
    settings = {"server": {"separate_gateway": True}, "conductor": {"admission": "baseline"}, "kv": {"arena_size": "256MiB"}}
    with Cluster(model=str(model), dtype="float32", profile=TINY_PROFILE, **settings) as cluster:
        both = TwoGateways(cluster, tmp_path_factory.mktemp("gateways"))
        try:
            yield both
        finally:
            both.second.stop()


def test_both_serve_at_once(gateways: TwoGateways) -> None:
    names = GATEWAYS * STREAMS_EACH
    with ThreadPoolExecutor(len(names)) as threads:
        ends = list(threads.map(lambda number: gateways.stream(names[number], number, OUTPUT_TOKENS, Event()), range(len(names))))
    assert ends == [StreamEnd(OUTPUT_TOKENS, ("length",), ())] * len(names)
    gateways.wait_nothing_held()


@pytest.mark.parametrize("victim", GATEWAYS)
def test_one_is_killed_and_the_other_goes_on(gateways: TwoGateways, victim: str) -> None:
    names = GATEWAYS * STREAMS_EACH
    begun = [Event() for _ in names]
    with ThreadPoolExecutor(len(names)) as threads:
        streams = [threads.submit(gateways.stream, name, 100 + number, KILLED_TOKENS, begun[number]) for number, name in enumerate(names)]
        assert all(event.wait(60) for event in begun)
        gateways.kill(victim)
        ends = {name: [stream.result() for stream, of in zip(streams, names, strict=True) if of == name] for name in GATEWAYS}
    (survivor,) = set(GATEWAYS) - {victim}
    assert ends[survivor] == [StreamEnd(KILLED_TOKENS, ("length",), ())] * STREAMS_EACH
    assert ends[victim] == [BROKEN] * STREAMS_EACH, "they ended before the kill"
    assert len(gateways.complete(survivor, prompt_of(200, 50), 4)["choices"]) == 1
    gateways.wait_nothing_held()
    gateways.wait_revived(victim)
    assert len(gateways.complete(victim, prompt_of(201, 50), 4)["choices"]) == 1


def test_a_conversation_goes_on_at_the_other_gateway(gateways: TwoGateways) -> None:
    """What was computed for one is found by the other."""
    prompt = prompt_of(300, 640)
    assert gateways.cached("gateway-0", prompt) == 0
    assert gateways.cached("gateway-1", prompt) == gateways.cached("gateway-0", prompt) == 576
    assert gateways.cached("gateway-1", [*prompt, *prompt_of(301, 64)]) == 640


def test_a_tenant_is_the_same_at_both(gateways: TwoGateways) -> None:
    """Its blocks are found at either, and nobody else's are."""
    prompt = prompt_of(400, 640)
    assert gateways.cached("gateway-0", prompt, "acme") == 0
    assert gateways.cached("gateway-1", prompt, "acme") == 576
    assert gateways.cached("gateway-1", prompt, "zeta") == gateways.cached("gateway-0", prompt) == 0
    assert gateways.cached("gateway-0", prompt, "zeta") == 576


def test_both_give_the_same_answer(gateways: TwoGateways) -> None:
    prompt = prompt_of(500, 300)
    answers = [gateways.complete(name, prompt, 16)["choices"][0]["text"] for name in GATEWAYS]
    assert answers[0] == answers[1]
