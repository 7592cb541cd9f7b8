"""How long the client of a sequence of 4,000 tokens waits for its next token when the sequence moves to another decode node under load
(`make bench-moves`)."""

from __future__ import annotations

import argparse
import bisect
import itertools
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

from benchmarks.driven import others_at_work
from benchmarks.results import LIMIT, Row, show, write
from springtide.protocol.instances import Role
from springtide.protocol.status import InstanceStatus
from springtide.rpc import conductor_pb2
from springtide.rpc.conductor_pb2_grpc import ConductorStub
from tests.support.cluster import Cluster
from tests.support.generate import Generated, generate
from tests.support.moves import move, num_moved
from tests.support.reference import random_prompt

PROMPT_TOKENS, OUTPUT_TOKENS = 4000, 1200
LOAD_TOKENS, LOAD_OUTPUT_TOKENS = 200, 6000
"""Of the others, which began before and end after it, and have moved by then: who has not moved, or moved last, moves first."""
ROUNDS = 3
"""Of the sequence from its beginning to its end: without moves, and with some."""
EVERY_S = 2.0
WINDOW_S = 1.5
"""After an order, in which its gap is looked for."""
STEPS = 2
NOTES = (
    "1 prefill node and 2 decode nodes of SmolLM2-135M-Instruct on one machine, whose cores they share with each other and the clients, "
    f"decode nodes with a thread each, which guess no tokens. A prompt of {PROMPT_TOKENS} tokens and {OUTPUT_TOKENS} tokens of output, "
    f"beside one sequence of {LOAD_TOKENS} tokens and more at each decode node, which stay. Every {EVERY_S:g} s the Conductor is told to "
    f"have the sequence move, as an operator would. A gap is the longest time between two tokens, as the client sees them, within "
    f"{WINDOW_S:g} s of the order; a step is the median of the times between tokens in the same {WINDOW_S:g} s. "
    f"The limit is {STEPS} steps and one exchange: the "
    "median time of a call to the Conductor that does nothing. Without a move: at the same distances in a run of the same sequence without "
    "any, whose text is the same."
)


@dataclass(frozen=True, slots=True)
class Gap:
    """Within the time after an order, in milliseconds."""

    longest: float
    step: float


def gaps(arrivals: Sequence[float], orders: Sequence[float]) -> list[Gap]:
    found = []
    for at in orders:
        first, last = bisect.bisect_right(arrivals, at) - 1, bisect.bisect_right(arrivals, at + WINDOW_S)
        window = arrivals[max(first, 0) : last]
        between = [1000 * (after - before) for before, after in itertools.pairwise(window)]
        if between:
            found.append(Gap(max(between), median(between)))
    return found


class Watched:
    """A sequence that runs, seen by its client."""

    def __init__(self, cluster: Cluster, prompt: Sequence[int], output_tokens: int, over: threading.Event | None = None) -> None:
        """`over`: it is called off then."""
        self.arrivals: list[float] = []
        self._cluster, self._prompt, self._output_tokens, self._over = cluster, prompt, output_tokens, over

    def run(self) -> Generated:
        def came(so_far: int) -> None:
            self.arrivals.append(time.perf_counter())

        cluster = self._cluster
        address, model = cluster.grpc_address, cluster.model
        return generate(address, model, self._prompt, self._output_tokens, on_token=came, until=self._over, timeout_s=900)


def played(cluster: Cluster, seed: int, moves: bool) -> tuple[list[Gap], Generated]:
    """What the sequence's client sees while it moves, or does not."""
    over, orders = threading.Event(), list[float]()
    watched = Watched(cluster, random_prompt(seed, PROMPT_TOKENS, 100, 40_000), OUTPUT_TOKENS)
    beside = [Watched(cluster, random_prompt(1000 + number, LOAD_TOKENS, 100, 40_000), LOAD_OUTPUT_TOKENS, over) for number in range(2)]
    with ThreadPoolExecutor(3) as threads:
        others = [threads.submit(other.run) for other in beside]
        cluster.wait_until(lambda: all(len(other.arrivals) > 10 for other in beside), "the others to run", timeout_s=120)
        change_places(cluster)
        running = threads.submit(watched.run)
        cluster.wait_until(lambda: len(watched.arrivals) > 10, "the sequence to run", timeout_s=120)
        while not running.done():
            began = time.perf_counter()
            here = max(decodes(cluster), key=lambda each: each.running).instance.instance_id
            orders.append(time.perf_counter())
            if moves:
                move(cluster, here, 1)
            time.sleep(max(0.0, EVERY_S - (time.perf_counter() - began)))
        over.set()
        for other in others:
            other.result()
    return gaps(watched.arrivals, orders), running.result()


def change_places(cluster: Cluster) -> None:
    """Both sequences that run move, until each has, and each decode node has one. Who has not moved yet goes first."""
    moved = 0
    while moved < 2 or any(each.running != 1 for each in decodes(cluster)):
        fullest = max(decodes(cluster), key=lambda each: each.running)
        before = num_moved(cluster)
        if not move(cluster, fullest.instance.instance_id, 1):
            time.sleep(0.2)  # It has left, and the node has yet to say so.
            continue
        cluster.wait_until(lambda before=before: num_moved(cluster) > before, "it to move", timeout_s=60)  # type: ignore[misc]
        moved += 1
        cluster.wait_until(lambda: sum(each.running for each in decodes(cluster)) == 2, "the nodes to say so")


def decodes(cluster: Cluster) -> list[InstanceStatus]:
    return [each for each in cluster.status().instances if each.instance.role is Role.DECODE]


def exchange_ms(cluster: Cluster) -> float:
    """Of a call to the Conductor that does nothing."""
    address, took = next(member.address for member in cluster.members() if member.role == "conductor"), list[float]()
    with cluster.channel(address) as channel:
        for _ in range(50):
            began = time.perf_counter()
            ConductorStub(channel).GetCluster(conductor_pb2.GetClusterRequest(), timeout=5, metadata=cluster.metadata)
            took.append(1000 * (time.perf_counter() - began))
    return median(took)


def rows(moved: Sequence[Gap], still: Sequence[Gap], exchange: float, behind: float, rounds: int) -> list[Row]:
    def row(name: str, gaps: Sequence[Gap], least: float | None) -> Row:
        """Of each, beside its own limit."""
        longest, limits = [gap.longest for gap in gaps], [STEPS * gap.step + exchange for gap in gaps]
        ratio = median(limit / gap for limit, gap in zip(limits, longest, strict=True))
        met = None if least is None else ratio >= least
        spread, limit_spread = (min(longest), max(longest)), (min(limits), max(limits))
        return Row(name, "ms", median(longest), spread, median(limits), LIMIT, ratio, least, met, "", limit_spread, len(gaps))

    return [
        row("longest gap at a move", moved, 1.0),
        row("longest gap without a move", still, None),
        Row("step", "ms", median(gap.step for gap in moved), rounds=rounds, spread=None),
        Row("exchange", "ms", exchange),
        Row("tokens behind, when it changes places", "tokens", behind),
        Row("moves", "moves", len(moved)),
    ]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fewer for a look: only whole runs are written down")
    count = parser.parse_args(arguments).rounds
    remark = others_at_work()
    settings = {
        "conductor": {"admission": "baseline"},
        "decode_node": {"threads": 1, "speculation": "off"},
        "server": {"separate_gateway": True},
    }
    moved, still = list[Gap](), list[Gap]()
    with Cluster(prefill=1, decode=2, **settings) as cluster:
        played(cluster, 0, moves=True)
        exchange = exchange_ms(cluster)
        before = num_moved(cluster), behind_tokens(cluster)
        for seed in range(1, count + 1):
            gaps_without, text = played(cluster, seed, moves=False)
            gaps_with, text_moved = played(cluster, seed, moves=True)
            assert text.token_ids == text_moved.token_ids, "a text is another where it moves"
            still += gaps_without
            moved += gaps_with
        moves, behind = num_moved(cluster) - before[0], behind_tokens(cluster) - before[1]
    assert moves > 0.8 * len(moved), f"of {len(moved)} times that it was told to, it has moved {moves}"
    made = rows(moved, still, exchange, behind / moves, count)
    show("Moves", made)
    if count == ROUNDS:
        print(write("moves", "make bench-moves", made, f"{NOTES} {remark}".strip(), ("longest gap at a move",)))


def behind_tokens(cluster: Cluster) -> float:
    return cluster.metric("gateway-0", "springtide_gateway_moved_behind_tokens_sum")


if __name__ == "__main__":
    main(sys.argv[1:])
