"""What every part of Springtide shares: ids, block keys, KV geometry, clock, cost models, configuration, errors, telemetry, RPC stubs."""

__version__ = "0.1.0"
