"""A batch beside online requests, while gateway, Conductor and a decode node are killed: every line is answered, and none twice.

`BATCH_LINES=500 pytest tests/e2e/test_batches.py` has a longer one (`make test-long`).
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator

import openai
import pytest

from tests.support.cluster import Cluster
from tests.support.profiles import DEMO_PROFILE

NUM_LINES = int(os.environ.get("BATCH_LINES", "120"))
ONLINE_TOKENS = 24


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    server, kv = {"separate_gateway": True}, {"arena_size": "64MiB"}
    with Cluster(prefill=1, decode=2, server=server, kv=kv, profile=DEMO_PROFILE) as cluster:
        yield cluster


def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=20, timeout=60)


class Online:
    """Somebody who asks one question after the other, whatever dies."""

    def __init__(self, cluster: Cluster) -> None:
        self.answers: list[str] = []
        self._client, self._model = client(cluster), cluster.model
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Online:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._over.wait(0.5):
            prompt = f"Question {len(self.answers)}: what is the capital of France?"
            answer = self._client.completions.create(
                model=self._model, prompt=prompt, max_tokens=ONLINE_TOKENS, temperature=0, extra_body={"ignore_eos": True}
            )
            self.answers.append(answer.choices[0].text)


def line(cluster: Cluster, number: int) -> bytes:
    body = {"model": cluster.model, "prompt": f"The number {number} is", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}).encode()


def completed(api: openai.OpenAI, batch_id: str) -> int:
    counts = api.batches.retrieve(batch_id).request_counts
    return counts.completed if counts is not None else 0


@pytest.mark.timeout(120 + NUM_LINES)
def test_every_line_is_answered_once_whatever_is_killed(cluster: Cluster) -> None:
    api = client(cluster)
    content = b"\n".join(line(cluster, number) for number in range(NUM_LINES))
    sent = api.files.create(file=("lines.jsonl", content), purpose="batch")
    with Online(cluster) as online:
        batch = api.batches.create(input_file_id=sent.id, endpoint="/v1/completions", completion_window="24h")
        for share, victim in ((0.1, "gateway-0"), (0.3, "decode-0"), (0.5, "conductor-0")):
            cluster.wait_until(lambda share=share: completed(api, batch.id) >= share * NUM_LINES, f"{share:.0%} of the batch", NUM_LINES)  # type: ignore[misc]
            cluster.kill(victim)
            cluster.wait_ready(victim)
        cluster.wait_until(lambda: api.batches.retrieve(batch.id).status == "completed", "the batch's end", NUM_LINES)
    done = api.batches.retrieve(batch.id)
    assert done.request_counts is not None and done.request_counts.completed == NUM_LINES and done.error_file_id is None
    rows = [json.loads(row) for row in api.files.content(done.output_file_id or "").text.splitlines()]
    assert Counter(row["custom_id"] for row in rows) == Counter(f"line-{number}" for number in range(NUM_LINES))
    assert all(row["response"]["status_code"] == 200 and row["response"]["body"]["choices"][0]["text"] for row in rows)
    assert len(online.answers) >= 3, "others were served all the while"
    cluster.wait_until(lambda: cluster.metric("decode-1", "springtide_decode_attempts_idle") == 0, "nothing in idle capacity")
