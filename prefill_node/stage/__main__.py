"""`python -m prefill_node.stage`: a stage of a prefill group, but for the first, which is the group's engine process."""

from __future__ import annotations

from prefill_node.stage.process import serve
from springtide.process import parse_arguments, run


def main() -> None:
    arguments = parse_arguments("A stage of a prefill group, started by the group's engine: computes some of the model's layers.")
    run("stage", arguments, lambda stop: serve(arguments, stop))


if __name__ == "__main__":
    main()
