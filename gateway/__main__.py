"""`python -m gateway`: a gateway in a process of its own."""

from __future__ import annotations

from springtide.process import importing, parse_arguments, run


def main() -> None:
    arguments = parse_arguments("The gateway: OpenAI-compatible HTTP and gRPC in front of the cluster.")
    with importing():
        from gateway.app import serve_gateway
    run("gateway", arguments, lambda stop: serve_gateway(arguments, stop))


if __name__ == "__main__":
    main()
