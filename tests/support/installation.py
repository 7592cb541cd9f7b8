"""Where a version of the project is installed, and another version of it beside the one that is tested."""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

import springtide
from tests.support.environment import own_environment

REPOSITORY = Path(springtide.__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Installation:
    """What commands of it begin with."""

    springtide: tuple[str, ...]
    ray: tuple[str, ...]
    alone: bool = False
    """Nothing is to be found by what tells Python where to look."""

    @property
    def environment(self) -> dict[str, str]:
        """Of its commands: this machine's of now."""
        return {name: value for name, value in own_environment().items() if not (self.alone and name == "PYTHONPATH")}


def this_installation() -> Installation:
    """Of whoever runs the tests."""
    return Installation((sys.executable, "-P", "-m", "deploy.cli"), (str(Path(sys.executable).with_name("ray")),))


def another_version(directory: Path, version: str) -> Installation:
    """The tested code as `version`, in a new environment at `directory`, with the dependencies of this one."""
    venv.create(directory, symlinks=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    described = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    for name in (pattern.removesuffix("*") for pattern in described):
        shutil.copytree(REPOSITORY / name, packages / name)
    said = packages / "springtide" / "__init__.py"
    text, count = re.subn(r'^__version__ = ".*"$', f'__version__ = "{version}"', said.read_text(), flags=re.MULTILINE)
    assert count == 1, f"{said} does not say which version it is"
    said.write_text(text)
    commands = {"springtide": "from deploy.cli import main", "ray": "from ray.scripts.scripts import main"}
    springtide_command, ray_command = (_command(directory, *each) for each in commands.items())
    return Installation((springtide_command,), (ray_command,), alone=True)


def _command(directory: Path, name: str, imports: str) -> str:
    """As pip makes it."""
    path = directory / "bin" / name
    path.write_text(f"#!{directory / 'bin' / 'python'}\nimport sys\n{imports}\nif __name__ == '__main__':\n    sys.exit(main())\n")
    path.chmod(0o755)
    return str(path)
