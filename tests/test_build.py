"""The C parts are no option: a build that cannot have them says in one line what it lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
WITHOUT_HEADERS = """
import runpy, setuptools
from distutils import sysconfig
sysconfig.get_python_inc = lambda *arguments, **options: "/nonexistent"
runpy.run_path("setup.py", run_name="__main__")
"""
SETUP = {"setup.py": ["setup.py"], "without headers": ["-c", WITHOUT_HEADERS]}


@pytest.mark.parametrize(
    ("how", "compiler", "said"),
    [
        ("setup.py", "no-such-compiler", "Springtide needs a C compiler, and there is no no-such-compiler (on Debian and Ubuntu: apt-get"),
        ("without headers", "gcc", "Springtide needs Python's headers, and there is no Python.h (on Debian and Ubuntu: apt-get"),
        ("setup.py", "false", "messenger._native, a C part of Springtide, does not build: "),
    ],
)
def test_a_build_that_lacks_something_says_so_in_its_last_line(tmp_path: Path, how: str, compiler: str, said: str) -> None:
    build = ["build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    environment = {**os.environ, "CC": compiler}
    ended = subprocess.run([sys.executable, *SETUP[how], *build], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert ended.returncode != 0
    assert ended.stderr.splitlines()[-1].startswith(said), ended.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_what_is_built_has_the_consoles_page(tmp_path: Path) -> None:
    build = [sys.executable, "setup.py", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    assets = Path("gateway", "console", "assets")
    assert {path.name for path in (tmp_path / assets).iterdir()} == {path.name for path in (REPOSITORY / assets).iterdir()}
