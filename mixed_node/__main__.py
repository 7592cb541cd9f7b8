"""`python -m mixed_node`: the engine process of a decode node, and of an instance that prefills and decodes."""

from __future__ import annotations

from springtide.process import importing, parse_arguments, run


def main() -> None:
    arguments = parse_arguments("An engine that decodes, and prefills where it is told so.")
    with importing():
        from mixed_node.server.starting import serve
    run("instance" if arguments.prefills else "decode", arguments, lambda stop: serve(arguments, stop))


if __name__ == "__main__":
    main()
