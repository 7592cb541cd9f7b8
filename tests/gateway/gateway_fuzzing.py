"""What tests by mutation share: which cases are tried, and how the answers are judged."""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
from gateway_cluster import MODEL, Cluster

from gateway.app import GatewayServer
from tests.support.waiting import until

MORE = int(os.environ.get("FUZZ_EXAMPLES", "0"))
SEED = random.randrange(1 << 30) if MORE else 1
SAMPLE = MORE or 100
"""Of each kind; with FUZZ_EXAMPLES others each time."""
TIMEOUT_S = 20
CaseT = TypeVar("CaseT")


def sampled(cases: Sequence[CaseT], kind: str) -> list[CaseT]:
    """Some of them, the same ones each time unless others are asked for."""
    dice = random.Random(f"{SEED} {kind}")
    return dice.sample(cases, min(SAMPLE, len(cases)))


@dataclass
class Judge:
    """Of one kind of requests."""

    statuses: Counter[int | str] = field(default_factory=Counter)
    """HTTP's by their numbers, gRPC's by their names."""
    failures: list[str] = field(default_factory=list)

    def take(self, what: str, status: int, content: bytes, *, names: str = "") -> None:
        """`names`: a refusal's message must have this."""
        self.statuses[status] += 1
        if status >= 500 and status != 504:
            self.failures.append(f"{what}: {status} {content[:300]!r}")
        elif status >= 400:
            try:
                message = json.loads(content)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                self.failures.append(f"{what}: {status} {content[:300]!r} is no error of this API")
                return
            if names and status == 400 and names not in message:
                self.failures.append(f"{what}: {message[:300]!r} does not name {names}")

    def done(self) -> None:
        print(SEED, dict(self.statuses))
        assert not self.failures, "\n".join([f"{len(self.failures)} of {self.statuses.total()}, seed {SEED}:", *self.failures])


async def assert_nothing_stays(gateway: GatewayServer, cluster: Cluster) -> None:
    await until(lambda: cluster.idle)
    async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=TIMEOUT_S) as client:
        assert (await client.post("/v1/completions", json={"model": MODEL, "prompt": "Say it."})).status_code == 200
        in_flight = re.findall(r"^springtide_gateway_requests_in_flight\{.*\} (.*)$", (await client.get("/metrics")).text, re.MULTILINE)
        assert set(in_flight) <= {"0.0"}
