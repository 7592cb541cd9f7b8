"""`python -m conductor`: the Conductor, in a process of its own."""

from __future__ import annotations

from functools import partial

from conductor.server.server import serve
from springtide.process import parse_arguments, run

if __name__ == "__main__":
    arguments = parse_arguments("The Conductor of a Springtide cluster.")
    run("conductor", arguments, partial(serve, arguments))
