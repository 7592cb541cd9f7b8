"""What can be chosen by name: configuration, command line and pages know what is registered, all of it and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from conductor.core.admission.rules import ADMISSIONS
from conductor.core.placement.policy import POLICIES
from deploy.cli import app
from engine.backends.choice import BACKENDS
from engine.formats.registry import ARCHITECTURES
from engine.loader import DTYPES
from gateway.tool_calls.families import REASONING_FAMILIES, TOOL_FAMILIES
from kvstore.core.eviction import EVICTION_POLICIES
from messenger.registry import TRANSPORTS
from simulator.hardware.catalog import MACHINES
from simulator.workload.generate import GENERATORS
from springtide import choices
from springtide.config import ClusterConfig, ConductorConfig, KVConfig, Section, ServerConfig, load_config
from springtide.errors import ConfigError

DOCS = Path(__file__).parents[1] / "docs"
SETTINGS: dict[str, tuple[type[Section], Any, Iterable[str]]] = {
    "kv.transports": (KVConfig, choices.TransportName, TRANSPORTS),
    "kv.eviction": (KVConfig, choices.EvictionName, EVICTION_POLICIES),
    "conductor.policy": (ConductorConfig, choices.PolicyName, POLICIES),
    "conductor.admission": (ConductorConfig, choices.AdmissionName, ADMISSIONS),
    "server.tool_parser": (ServerConfig, choices.ToolParserName, TOOL_FAMILIES),
    "server.reasoning_parser": (ServerConfig, choices.ReasoningParserName, REASONING_FAMILIES),
    "dtype": (ClusterConfig, choices.DtypeName, DTYPES),
}
OPTIONS: dict[str, tuple[Any, Iterable[str]]] = {
    "--policy": (choices.PolicyName, POLICIES),
    "--admission": (choices.AdmissionName, ADMISSIONS),
    "--workload": (choices.WorkloadName, GENERATORS),
    "--hardware": (choices.MachineName, MACHINES),
}
"""Those of `springtide simulate`."""
PAGES = {
    "packages/messenger.md": TRANSPORTS,
    "packages/kvstore.md": EVICTION_POLICIES,
    "packages/conductor.md": [*POLICIES, *ADMISSIONS],
    "packages/engine.md": BACKENDS,
    "packages/gateway.md": [*TOOL_FAMILIES, *REASONING_FAMILIES],
    "packages/models.md": [architecture.name for architecture in ARCHITECTURES],
    "packages/simulator.md": [*GENERATORS, *MACHINES],
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_knows_what_is_registered_and_nothing_else(setting: str) -> None:
    """In the registry's order, which is that of the error message and of the page."""
    section, names, registry = SETTINGS[setting]
    assert list(get_args(names)) == list(registry)
    field = section.model_fields[setting.rpartition(".")[2]]
    several = setting == "kv.transports"
    for name in registry:
        TypeAdapter(field.annotation).validate_python([name] if several else name)
    with pytest.raises(ConfigError, match=", ".join(f"'{name}'" for name in list(registry)[:-1])):
        load_config(overrides={setting: ["pigeon"] if several else "pigeon"}, environ={})


def test_kernels_are_backends() -> None:
    """Not all of them: which ones are tried before the last is for `auto` to say."""
    assert set(get_args(choices.KernelsName)) - {"auto"} <= BACKENDS.keys()


@pytest.mark.parametrize("page", PAGES)
def test_a_table_of_the_page_has_whatever_is_registered(page: str) -> None:
    rows = "\n".join(line for line in (DOCS / page).read_text().splitlines() if line.startswith("|"))
    assert [name for name in PAGES[page] if f"`{name}`" not in rows] == []


@pytest.mark.parametrize("option", OPTIONS)
def test_help_has_whatever_is_registered_and_nothing_else(option: str) -> None:
    names, registry = OPTIONS[option]
    assert list(get_args(names)) == list(registry)
    shown = CliRunner().invoke(app, ["simulate", "--help"], env={"COLUMNS": "400", "TERM": "dumb"}).output
    (line,) = [line for line in shown.splitlines() if re.match(rf"\W*{option} ", line)]
    assert [name for name in registry if name not in line] == []


def test_help_does_without_what_takes_long_to_import() -> None:
    found = "import sys, deploy.cli; print(*sorted({'grpc', 'numpy', 'pydantic', 'torch', 'yaml'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", found], cwd=DOCS.parent, text=True).split() == []
