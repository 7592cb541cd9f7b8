"""`python -m conductor`: the Conductor, in a process of its own."""

from __future__ import annotations

from functools import partial

from springtide.process import importing, parse_arguments, run

if __name__ == "__main__":
    arguments = parse_arguments("The Conductor of a Springtide cluster.")
    with importing():
        from conductor.server.server import serve
    run("conductor", arguments, partial(serve, arguments))
