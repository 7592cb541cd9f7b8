"""What holds the parts together: generated files are current, and imports flow downwards only."""

import subprocess
import sys
from pathlib import Path

from deploy.commands.reference import configuration_reference
from springtide.rpc.generate import REPOSITORY, generate


def test_stubs_are_those_of_the_schemas(tmp_path: Path) -> None:
    fresh = {path.name: path.read_text() for path in generate(tmp_path)}
    checked_in = {path.name: path.read_text() for path in (REPOSITORY / "springtide" / "rpc").glob("*_pb2*")}
    assert fresh.keys() == checked_in.keys(), "run `make proto`"
    stale = [name for name, text in fresh.items() if checked_in[name] != text]
    assert not stale, "run `make proto`"


def test_the_configuration_page_is_that_of_the_model() -> None:
    page = (REPOSITORY / "docs" / "configuration.md").read_text()
    assert page == configuration_reference(), "run `springtide config --describe > docs/configuration.md`"


def test_imports_flow_downwards_only() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([lint, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
