"""What the Conductor and its gateways keep of nodes that come and go, each under another name, does not grow with them."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Counter

from conductor import metrics
from conductor.core.placement.transfer import PlannedFetch, TransferModel
from gateway import metrics as gateway_metrics
from springtide.ids import AttemptId, NodeId


def fetch(source: str, destination: str) -> PlannedFetch:
    return PlannedFetch(NodeId(source), NodeId(destination), 2.0, 1000, 5.0)


def values(counter: Counter) -> list[float]:
    """Of its series."""
    return [sample.value for metric in counter.collect() for sample in metric.samples if sample.name.endswith("_total")]


def test_a_node_that_goes_during_its_transfer_leaves_its_number_to_another() -> None:
    model = TransferModel()
    for generation in range(500):
        source, destination, attempt = f"a-{generation}", f"b-{generation}", AttemptId(f"attempt-{generation}")
        model.begin(attempt, fetch(source, destination))
        model.forget(NodeId(source))
        model.forget(NodeId(destination))
        model.end(attempt, 1000, 1.0)
        model.validate(set())
    assert len(model.links) == 64 and model.number(NodeId("last")) < 4


def test_a_rate_that_was_measured_to_a_node_that_is_gone_is_not_that_of_the_next_with_its_number() -> None:
    model = TransferModel()
    model.begin(AttemptId("one"), fetch("a", "b"))
    number = model.number(NodeId("a"))
    model.forget(NodeId("a"))
    model.end(AttemptId("one"), 1000, 1.0)
    assert model.number(NodeId("another")) == number
    assert model.rates_from(number) is None


@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "forget", "number"]), st.integers(0, 5), st.integers(0, 5)), max_size=60))
def test_numbers_are_neither_lost_nor_given_twice(steps: list[tuple[str, int, int]]) -> None:
    model, live = TransferModel(), set[AttemptId]()
    for operation, one, other in steps:
        attempt, node = AttemptId(f"attempt-{one}"), NodeId(f"node-{other}")
        match operation:
            case "begin":
                model.begin(attempt, fetch(f"node-{one}", f"node-{other}"))
                live.add(attempt)
            case "end":
                model.end(attempt, 1000, 2.0)
                live.discard(attempt)
            case "forget":
                model.forget(node)
            case "number":
                model.number(node)
        model.validate(live)
    for attempt in live:
        model.end(attempt)
    for number in range(6):
        model.forget(NodeId(f"node-{number}"))
    model.validate(set())
    assert len({model.number(NodeId(f"new-{i}")) for i in range(6)}) == 6 and model.number(NodeId("new-0")) < 12


def test_series_of_nodes_that_are_gone_end() -> None:
    series: list[tuple[Counter, Callable[[str], None]]] = [
        (gateway_metrics.FAILED_ATTEMPTS, gateway_metrics.count_failed_attempt),
        (metrics.SNAPSHOTS_REQUESTED, _ask_and_lose),
        (metrics.SILENCES, lambda node_id: metrics.count_silence(node_id, "store")),
    ]
    failed_before = sum(values(gateway_metrics.FAILED_ATTEMPTS))
    for counter, happen in series:
        others = len(values(counter))  # That tests before this one made in this process.
        for generation in range(1000):
            happen(f"node-{generation}")
        assert len(values(counter)) - others <= 257
    assert sum(values(gateway_metrics.FAILED_ATTEMPTS)) == failed_before + 1000


def _ask_and_lose(node_id: str) -> None:
    metrics.SNAPSHOTS_REQUESTED.labels(node_id).inc()
    metrics.forget_node(node_id)
    metrics.forget_node(node_id)
