"""Benchmarks: each writes `benchmarks/results/NAME.json`; `make performance` renders them into docs/performance.md."""
