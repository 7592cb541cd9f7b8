"""Writes docs/conformance.md, from a cluster that it starts."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

from tests.conformance.trials import Outcome, all_results, table
from tests.support.cluster import Cluster

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
SDKS = ("openai", "anthropic", "google-genai")


def main() -> int:
    with Cluster() as cluster:
        results = all_results(cluster.url, cluster.model)
    wrong = [result for result in results if result.outcome is Outcome.WRONG]
    for result in wrong:
        print(f"{result.surface}: {result.name}: {result.said}", file=sys.stderr)
    if not wrong:
        PAGE.write_text(table(results, {name: version(name) for name in SDKS}))
    print(f"{len(results)} tried, {sum(result.outcome is Outcome.SERVED for result in results)} served, {len(wrong)} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
