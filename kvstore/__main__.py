"""The store process of a node: `python -m kvstore`."""

from __future__ import annotations

from springtide.process import importing, parse_arguments, run


def main() -> None:
    arguments = parse_arguments("The store of a node: its share of the KV pool.")
    with importing():
        from kvstore.server.process import serve
    run("store", arguments, lambda stop: serve(arguments, stop))


if __name__ == "__main__":
    main()
