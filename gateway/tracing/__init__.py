"""Traces: what became of a request, everywhere in the cluster, as spans that the gateway makes when it has ended (docs/tracing.md).

`record` is what is gathered while a request runs, `tracer` gathers it from the core's events and actions and decides at the end whether it
is kept, `spans` makes the spans of what is, and `otlp` sends them. The first three are free of I/O and clock.
"""
