"""Writes docs/conformance.md, from a cluster that it starts."""

from __future__ import annotations

import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from tests.conformance.cluster import running
from tests.conformance.trials import Outcome, all_results, table

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
SDKS = ("openai", "anthropic", "google-genai")


def main() -> int:
    with running() as server:
        results = all_results(server)
    wrong = [result for result in results if result.outcome is Outcome.WRONG]
    for result in wrong:
        print(f"{result.surface}: {result.name}: {result.said}", file=sys.stderr)
    if not wrong:
        PAGE.write_text(table(results, {name: version(name) for name in SDKS}))
    counts = Counter(str(result.outcome) for result in results)
    print(f"{len(results)} tried: {', '.join(f'{count} {outcome}' for outcome, count in counts.most_common())}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
