"""`python -m conductor`: the Conductor, with a gateway in the same process unless the configuration separates them."""

from __future__ import annotations

from functools import partial

from conductor.server.process import serve
from springtide.process import parse_arguments, run

if __name__ == "__main__":
    arguments = parse_arguments("The Conductor of a Springtide cluster.")
    run("conductor", arguments, partial(serve, arguments))
