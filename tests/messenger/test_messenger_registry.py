"""The transports that a configuration can name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from messenger_support import OPTIONS

from messenger.arena_memory import SharedMemory
from messenger.registry import TRANSPORTS, TransportOptions, TransportSite, choose_transports, make_transport, transport_options_of
from springtide.config import SECRET_VARIABLE, load_config
from springtide.errors import ConfigError

ABSENT = "this machine has no RDMA device"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[TransportSite]:
    memory = SharedMemory.create(2, 4096, 1)
    yield TransportSite(memory, "127.0.0.1", tmp_path / "arena.sock")
    memory.close()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.rdma if name == "rdma" else ()) for name in TRANSPORTS])
async def test_a_transport_that_is_made_by_name_has_that_name(site: TransportSite, name: str) -> None:
    transport = make_transport(name, site, OPTIONS)
    assert transport.name == name
    await transport.close()


def test_a_name_that_nobody_has_registered_is_refused_with_those_that_there_are(site: TransportSite) -> None:
    with pytest.raises(ValueError, match=f"no transport 'pigeon'; there are {', '.join(TRANSPORTS)}"):
        make_transport("pigeon", site, TransportOptions())


def test_without_a_choice_it_is_all_that_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """What not every machine has may fail when it starts."""
    everywhere = {name for name, transport in TRANSPORTS.items() if transport.problem is None}
    has_rdma(monkeypatch, None)
    with_rdma, may_fail = choose_transports(None, TransportOptions())
    assert with_rdma == tuple(name for name in TRANSPORTS if name in with_rdma) and everywhere | {"rdma"} <= set(with_rdma)
    assert set(may_fail) == set(with_rdma) - everywhere
    has_rdma(monkeypatch, ABSENT)
    assert choose_transports(None, TransportOptions())[0] == tuple(name for name in with_rdma if name != "rdma")


def test_what_is_named_is_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    has_rdma(monkeypatch, None)
    assert choose_transports(("tcp", "rdma"), TransportOptions()) == (("tcp", "rdma"), ())
    has_rdma(monkeypatch, ABSENT)
    assert choose_transports(("tcp", "shm"), TransportOptions()) == (("tcp", "shm"), ())
    with pytest.raises(ConfigError, match=rf"kv\.transports: {ABSENT}"):
        choose_transports(("rdma", "tcp"), TransportOptions())


def test_a_device_that_is_named_and_not_there_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    has_rdma(monkeypatch, ABSENT)
    options = replace(TransportOptions(), rdma=replace(OPTIONS.rdma, devices=("mlx5_0",)))
    with pytest.raises(ConfigError, match=rf"kv\.transports: {ABSENT}"):
        choose_transports(None, options)
    assert choose_transports(("shm", "tcp"), options) == (("shm", "tcp"), ())


def test_options_are_those_of_the_configuration() -> None:
    secret = "sixteen characters and more"
    overrides = {"kv.checksums": True, "kv.rdma_devices": ["mlx5_1"], "kv.rdma_traffic_class": 104}
    options = transport_options_of(load_config(overrides=overrides, environ={SECRET_VARIABLE: secret}))
    assert options.tcp.checksums and options.tcp.secret == options.rdma.secret == secret.encode()
    assert (options.rdma.devices, options.rdma.traffic_class) == (("mlx5_1",), 104)
    open_ones = transport_options_of(load_config(overrides={"kv.open_to_strangers": True}, environ={}))
    assert open_ones.tcp.open_to_strangers and open_ones.rdma.open_to_strangers
    with pytest.raises(ConfigError, match="cluster_secret"):
        transport_options_of(load_config(environ={}))


def has_rdma(monkeypatch: pytest.MonkeyPatch, problem: str | None) -> None:
    monkeypatch.setattr("messenger.registry.rdma_problem", lambda devices: problem)
