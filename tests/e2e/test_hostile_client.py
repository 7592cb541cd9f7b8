"""An attack of `make bench-hostile`, held to its bound: what one client sends costs others little."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.hostile import MOST_ADDED_MS, attack
from tests.support.cluster import Cluster
from tests.support.profiles import DEMO_PROFILE


@pytest.mark.alone
def test_long_texts_of_one_client_add_little_to_the_time_between_others_tokens() -> None:
    with Cluster(prefill=1, decode=1, profile=DEMO_PROFILE) as cluster:
        (added,) = [row for row in asyncio.run(attack("the longest text that is tokenised", cluster)) if row.row == "added"]
    print(f"p99 of the time between tokens, added: {added.ours:.1f} ms")
    assert added.ours <= MOST_ADDED_MS
