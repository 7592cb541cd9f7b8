"""`python -m decode_node`: the engine process of a decode node."""

from __future__ import annotations

from decode_node.server.starting import serve
from springtide.process import parse_arguments, run


def main() -> None:
    arguments = parse_arguments("The engine of a decode node: generates tokens for a continuously changing batch.")
    run("decode", arguments, lambda stop: serve(arguments, stop))


if __name__ == "__main__":
    main()
