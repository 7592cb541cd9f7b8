"""A streamed completion of a test cluster, read to its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from tests.support.cluster import Cluster


@dataclass(frozen=True, slots=True)
class StreamEnd:
    tokens: int
    finish_reasons: tuple[str, ...]
    errors: tuple[str, ...]


def stream(cluster: Cluster, prompt: Sequence[int], output_tokens: int, on_event: Callable[[], None], url: str | None = None) -> StreamEnd:
    """`on_event` is called for each piece of output that comes. `url`: of another gateway than the cluster's first."""
    request = {
        "model": cluster.model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tokens, finishes, errors = 0, [], []
    with httpx.stream("POST", f"{url or cluster.url}/v1/completions", json=request, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                errors.append(event["error"]["message"])
                continue
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                on_event()
                if choice["finish_reason"]:
                    finishes.append(choice["finish_reason"])
    return StreamEnd(tokens, tuple(finishes), tuple(errors))
