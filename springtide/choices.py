"""The names that settings and options choose among, in the order in which pages and messages show them.

What a name stands for is registered where it is made, above this package, which imports nothing from there: `tests/test_registries.py`
holds each registry to the names. Without pydantic, so that `springtide --help` is quick.
"""

from __future__ import annotations

from typing import Literal

TransportName = Literal["shm", "rdma", "tcp"]
"""`kv.transports`, best first: messenger/registry.py."""

EvictionName = Literal["hit-density", "lru", "lfu", "length-aware"]
"""`kv.eviction`: kvstore/core/eviction.py."""

PolicyName = Literal["kvcache-centric", "cache-aware", "load-balance", "round-robin", "random"]
"""`conductor.policy`: conductor/core/placement/policy.py."""

RoutingName = Literal["cache-aware", "least-loaded"]
"""Of the coupled instances that a simulation compares with: simulator/coupled.py."""

AdmissionName = Literal["baseline", "early-rejection", "early-rejection-predicted", "early-rejection-request"]
"""`conductor.admission`: conductor/core/admission/rules.py."""

DtypeName = Literal["bfloat16", "float32"]
"""`dtype`: engine/loader.py."""

KernelsName = Literal["auto", "plain"]
"""`kernels`: engine/backends/choice.py. Which backends `auto` is the best of is not for a setting to say."""

WorkloadName = Literal["poisson", "bursts", "chat", "documents", "agents"]
"""`springtide simulate --workload`: simulator/workload/generate.py."""

MachineName = Literal["a100-llama2-70b", "h100-llama2-70b", "a100-llama3-8b"]
"""`springtide simulate --hardware`: simulator/hardware/catalog.py."""

NodeRole = Literal["instance", "prefill", "decode", "store", "gateway", "conductor"]
"""`springtide node`: deploy/local/plan.py."""

ToolParserName = Literal["hermes", "llama3", "mistral", "pythonic"]
"""`server.tool_parser`: gateway/tool_calls/families.py."""

ReasoningParserName = Literal["think", "mistral"]
"""`server.reasoning_parser`: gateway/tool_calls/families.py."""
