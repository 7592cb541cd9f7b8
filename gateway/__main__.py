"""`python -m gateway`: a gateway in a process of its own."""

from __future__ import annotations

import asyncio

from gateway.app import serve_gateway
from springtide.process import parse_arguments, run


def main() -> None:
    arguments = parse_arguments("The gateway: OpenAI-compatible HTTP and gRPC in front of the cluster.")

    async def serve(stop: asyncio.Event) -> None:
        await serve_gateway(arguments, stop)

    run("gateway", arguments, serve)


if __name__ == "__main__":
    main()
