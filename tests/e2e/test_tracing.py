"""One trace of a request through a real cluster, as a collector receives it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

pytest.importorskip("opentelemetry.proto", reason="needs the extra otel")

from springtide.trace_context import TraceContext
from tests.support.cluster import Cluster, cached_blocks, evict_all
from tests.support.otlp import Collector, ReceivedSpan
from tests.support.reference import random_prompt
from tests.support.traces import children, named, unaccounted_s

OUTPUT_TOKENS = 80
KILL_AFTER = 12
CHUNK_TOKENS = 256
STAGES = 2
CLIENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", True)
PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")


def decoding(cluster: Cluster) -> str | None:
    return next((name for name in DECODES if cluster.metric(name, "springtide_decode_attempts_running") > 0), None)


def lose_prefix_at_prefill_nodes(cluster: Cluster) -> None:
    """What a decode node was handed over is now the only copy."""
    for name in PREFILLS:
        evict_all(Path(cluster.record.run_dir, f"{name}.store.sock"))

    def known() -> bool:
        status = cluster.status()
        if len(status.instances) < len(PREFILLS + DECODES):
            return False
        return not any(cached_blocks(status, name) for name in PREFILLS) and any(cached_blocks(status, name) for name in DECODES)

    cluster.wait_until(known, "the Conductor to know")


def hurt(cluster: Cluster, prompt: Sequence[int]) -> tuple[float, int, str]:
    """Streams an output, and kills the decode node that makes it in the midst. Returns what that took the client, how many pieces came,
    and who was killed."""
    request = {"model": cluster.model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
    killed, pieces, began = "", 0, time.monotonic()
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=request, timeout=120, headers={"traceparent": CLIENT.header}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["traceparent"].startswith(f"00-{CLIENT.trace_id}-")
        for line in answer.iter_lines():
            pieces += line.startswith("data: {")
            if pieces >= KILL_AFTER and not killed and (running := decoding(cluster)) is not None:
                killed = running
                cluster.kill(killed)
    return time.monotonic() - began, pieces, killed


@pytest.mark.alone
def test_a_long_prompt_with_a_remote_prefix_and_a_killed_decode_node_is_one_trace_that_explains_its_time() -> None:
    prefix = random_prompt(1, length=960)
    settings = {"chunk_tokens": CHUNK_TOKENS, "stages": STAGES}
    with Collector() as collector, Cluster(prefill=2, decode=2, prefill_node=settings, tracing={"endpoint": collector.url}) as cluster:
        first = {"model": cluster.model, "prompt": prefix, "max_tokens": 4, "ignore_eos": True}
        assert httpx.post(f"{cluster.url}/v1/completions", json=first, timeout=120).status_code == 200
        lose_prefix_at_prefill_nodes(cluster)
        took_s, _, killed = hurt(cluster, prefix + random_prompt(2, length=840))
        spans = collector.trace(CLIENT.trace_id)
        logs = {name: cluster.log(name, lines=200) for name in PREFILLS}
    assert killed, "nobody was killed: the output was too short"

    root = spans[0]
    assert (root.parent_id, root.attributes["gen_ai.operation.name"]) == (CLIENT.span_id, "text_completion")
    assert root.attributes["gen_ai.usage.output_tokens"] == OUTPUT_TOKENS and not root.error
    assert [span.name for span in children(spans, root) if span.name != "wait"] == ["prepare", "attempt", "attempt"]
    lost, last = named(spans, "attempt")
    assert lost.attributes["springtide.culprit"] == killed and lost.error and last.links == (lost.span_id,)
    check_attempts(spans, [lost, last])
    check_chunks(spans)
    (fetch,) = [span for span in named(spans, "fetch") if span.parent_id in {one.span_id for one in children(spans, lost)}]
    # Two of 30 layers' worth of K and V are far more than a kilobyte a token.
    assert fetch.attributes["springtide.tokens"] == 960 and fetch.attributes["springtide.bytes"] > 960 * 1024
    assert fetch.attributes["springtide.hidden_ms"] + fetch.attributes["springtide.waited_ms"] >= 0
    (over,) = [span for span in named(spans, "hand_over") if span.parent_id in {one.span_id for one in children(spans, lost)}]
    assert over.attributes["springtide.bytes"] > 0

    by_id = {span.span_id: span for span in spans}
    for span in spans[1:]:
        parent = by_id[span.parent_id]
        assert parent.begin <= span.begin <= span.end <= parent.end, (span, parent)
    print(f"client {took_s:.3f} s, request {root.end - root.begin:.3f} s, in no span {unaccounted_s(spans):.3f} s")
    assert abs(took_s - (root.end - root.begin)) < 0.05 * took_s
    assert unaccounted_s(spans) < 0.05 * took_s
    assert any(f"trace_id={CLIENT.trace_id}" in log for log in logs.values())


def check_attempts(spans: Sequence[ReceivedSpan], attempts: Sequence[ReceivedSpan]) -> None:
    """Each has been to the Conductor and to both sides, at instances that its decision names."""
    for attempt in attempts:
        schedule, *sides = children(spans, attempt)
        assert schedule.name == "schedule" and schedule.attributes["springtide.predicted.ttft_ms"] > 0
        assert [side.name for side in sides] == ["prefill", "decode"]
        for side in sides:
            expected = schedule.attributes[f"springtide.{side.name}.instance"]
            assert side.attributes["springtide.instance"] == expected, "an attempt is where the Conductor has placed it"
        steps = [span for span in children(spans, sides[1]) if span.name == "steps"]
        assert len(steps) == 1 and steps[0].attributes["springtide.steps"] > 0


def check_chunks(spans: Sequence[ReceivedSpan]) -> None:
    """The chunks of each prompt are all of it that was not cached, and each has been through all stages, one after another."""
    for prefill in named(spans, "prefill"):
        chunks = [span for span in children(spans, prefill) if span.name == "chunk"]
        computed = prefill.attributes["springtide.prompt.tokens"] - prefill.attributes["springtide.cached_tokens"]
        if prefill.attributes["springtide.role"] == "prefill":
            assert sum(chunk.attributes["springtide.tokens"] for chunk in chunks) == computed
            for chunk in chunks:
                stages = children(spans, chunk)
                assert [stage.attributes["springtide.stage"] for stage in stages] == list(range(STAGES))
                assert all(stage.attributes["springtide.busy_ms"] > 0 for stage in stages)
                assert stages[0].begin <= stages[1].end
