"""The command `springtide` in the test's own process: one of its own takes a second of a processor for its imports alone."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from unittest import mock

from deploy import cli


@dataclass(frozen=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


def springtide(*arguments: str, **environment: str) -> Result:
    """Runs it to its end."""
    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["springtide", *arguments]),
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            cli.main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
    return Result(code, output.getvalue(), errors.getvalue())
