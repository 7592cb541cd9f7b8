"""What of each API is served: every field that the vendors' own SDKs know, and vLLM's extras, tried against a running cluster.

`python -m tests.conformance` writes docs/conformance.md; `tests/e2e/test_conformance.py` holds it to be true.
"""
