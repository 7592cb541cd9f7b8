"""`python -m deploy.head`: a Conductor and a gateway in one process, as a small cluster has them. They live and die together."""

from __future__ import annotations

import asyncio
from functools import partial

from springtide.errors import ConfigError
from springtide.process import ProcessArguments, importing, parse_arguments, run


async def serve(arguments: ProcessArguments, stop: asyncio.Event) -> None:
    """Serves until `stop`. Raises ConfigError where there are other Conductors, which are there to outlive one another."""
    replicas = arguments.config.conductor.replicas
    if replicas > 1:
        raise ConfigError(
            f"conductor.replicas is {replicas}, which needs server.separate_gateway: true: a gateway in a Conductor's process would "
            "die with it"
        )
    with importing():
        from conductor.server.server import serve as serve_conductor
        from gateway.app import serve_gateway
    await serve_conductor(arguments, stop, partial(serve_gateway, arguments, stop))


if __name__ == "__main__":
    arguments = parse_arguments("The Conductor of a Springtide cluster, and a gateway.")
    run("conductor", arguments, partial(serve, arguments))
