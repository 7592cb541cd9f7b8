"""`python -m prefill_node`: the engine process of a prefill group."""

from __future__ import annotations

from springtide.process import importing, parse_arguments, run


def main() -> None:
    arguments = parse_arguments("The engine of a prefill group: computes prompts and hands them over to decode nodes.")
    with importing():
        from prefill_node.server.starting import serve
    run("prefill", arguments, lambda stop: serve(arguments, stop))


if __name__ == "__main__":
    main()
