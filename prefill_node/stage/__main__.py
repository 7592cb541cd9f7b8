"""`python -m prefill_node.stage`: a stage of a prefill group, but for the first, which is the group's engine process."""

from __future__ import annotations

from springtide.process import importing, parse_arguments, run


def main() -> None:
    arguments = parse_arguments("A stage of a prefill group, started by the group's engine: computes some of the model's layers.")
    with importing():
        from prefill_node.stage.process import serve
    run("stage", arguments, lambda stop: serve(arguments, stop))


if __name__ == "__main__":
    main()
