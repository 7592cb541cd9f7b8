"""What can be chosen by name: configuration, command line and pages know what is registered, all of it and nothing else."""

from __future__ import annotations

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
from kvstore.core.eviction import EVICTION_POLICIES
from messenger.registry import TRANSPORTS
from springtide import choices
from springtide.config import ClusterConfig, ConductorConfig, KVConfig, Section, load_config
from springtide.errors import ConfigError

DOCS = Path(__file__).parents[1] / "docs"
SETTINGS: dict[str, tuple[type[Section], Any, Iterable[str]]] = {
    "kv.transports": (KVConfig, choices.TransportName, TRANSPORTS),
    "kv.eviction": (KVConfig, choices.EvictionName, EVICTION_POLICIES),
    "conductor.policy": (ConductorConfig, choices.PolicyName, POLICIES),
    "conductor.admission": (ConductorConfig, choices.AdmissionName, ADMISSIONS),
    "dtype": (ClusterConfig, choices.DtypeName, DTYPES),
}
PAGES = {
    "packages/messenger.md": TRANSPORTS,
    "packages/kvstore.md": EVICTION_POLICIES,
    "packages/conductor.md": [*POLICIES, *ADMISSIONS],
    "packages/engine.md": BACKENDS,
    "packages/models.md": [architecture.name for architecture in ARCHITECTURES],
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


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_whatever_is_registered(page: str) -> None:
    text = (DOCS / page).read_text()
    assert [name for name in PAGES[page] if f"`{name}`" not in text] == []


@pytest.mark.parametrize(("option", "registry"), [("--policy", POLICIES), ("--admission", ADMISSIONS)])
def test_help_has_whatever_is_registered(option: str, registry: Iterable[str]) -> None:
    shown = CliRunner().invoke(app, ["simulate", "--help"], env={"COLUMNS": "400", "TERM": "dumb"}).output
    (line,) = [line for line in shown.splitlines() if f" {option} " in line]
    assert [name for name in registry if name not in line] == []


def test_help_does_without_what_takes_long_to_import() -> None:
    found = "import sys, deploy.cli; print(*sorted({'grpc', 'numpy', 'pydantic', 'torch', 'yaml'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", found], cwd=DOCS.parent, text=True).split() == []
