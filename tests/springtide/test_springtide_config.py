"""Configuration: what wins, and what a mistake is answered with."""

from collections.abc import Callable
from pathlib import Path

import pytest

from springtide.config import ClusterConfig, load_config
from springtide.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def test_without_sources_it_is_the_defaults() -> None:
    assert load_config(environ={}) == ClusterConfig()


def test_later_sources_win(tmp_path: Path) -> None:
    path = write(tmp_path, "prefill: 2\ndecode: 2\nkv: {block_tokens: 16, arena_size: 256MiB}\n")
    config = load_config(path, {"decode": 4}, {"SPRINGTIDE_DECODE": "3", "SPRINGTIDE_KV__BLOCK_TOKENS": "32"})
    assert (config.prefill, config.decode, config.kv.block_tokens, config.kv.arena_size) == (2, 4, 32, 256 << 20)


def test_options_that_were_not_given_change_nothing() -> None:
    assert load_config(overrides={"instances": None}, environ={}).instances == 2


def test_a_resolved_configuration_reads_back_the_same(tmp_path: Path) -> None:
    import yaml

    config = load_config(overrides={"kv.transports": ["tcp"], "run_dir": "/tmp/somewhere", "prefill_node.threads": 2}, environ={})
    assert load_config(write(tmp_path, yaml.safe_dump(config.model_dump(mode="json", exclude_none=True))), environ={}) == config


@pytest.mark.parametrize(("text", "size"), [("1GiB", 1 << 30), ("512M", 512 << 20), ("1.5k", 1536), ("4096", 4096), ("100B", 100)])
def test_sizes_have_units_of_1024(text: str, size: int) -> None:
    assert load_config(overrides={"kv.arena_size": text}, environ={}).kv.arena_size == size


@pytest.mark.parametrize(
    ("yaml_text", "named"),
    [
        ("prefil: 2", "prefil "),
        ("kv: {block_token: 64}", "kv.block_token "),
        ("kv: {block_tokens: many}", "kv.block_tokens "),
        ("kv: {block_tokens: 4}", "kv.block_tokens "),
        ("kv: {arena_size: 3 apples}", "kv.arena_size "),
        ("kv: {transports: [pigeon]}", "kv.transports.0 "),
        ("kv: {transports: []}", "kv.transports "),
        ("server: {port: 99999}", "server.port "),
        ("dtype: int3", "dtype "),
        ("kv: 3", "kv "),
        ("kv:", "kv "),
        ("server: {port: 9000, grpc_port: 9000}", "server "),
        ("prefill_node: {stages: 2, stage_layers: [10, 10, 10]}", "prefill_node "),
        ("prefill_node: {stages: 2, stage_layers: [30, 0]}", "prefill_node.stage_layers"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_value_and_the_file(tmp_path: Path, yaml_text: str, named: str) -> None:
    path = write(tmp_path, yaml_text)
    with pytest.raises(ConfigError) as error:
        load_config(path, environ={})
    assert error.value.message.startswith(named)
    assert str(path) in error.value.message and "\n" not in error.value.message, "one mistake is told once"


def test_a_mistake_in_the_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"kv\.block_tokens \(from SPRINGTIDE_KV__BLOCK_TOKENS\).*'x'"):
        load_config(environ={"SPRINGTIDE_KV__BLOCK_TOKENS": "x"})
    with pytest.raises(ConfigError, match=r"nonsense \(from SPRINGTIDE_NONSENSE\): there is no such setting"):
        load_config(environ={"SPRINGTIDE_NONSENSE": "1"})


def test_a_list_in_the_environment_that_is_no_list_names_the_variable() -> None:
    assert load_config(environ={"SPRINGTIDE_KV__TRANSPORTS": "[tcp]"}).kv.transports == ("tcp",)
    with pytest.raises(ConfigError, match=r"kv\.transports \(from SPRINGTIDE_KV__TRANSPORTS\).*'\[shm'"):
        load_config(environ={"SPRINGTIDE_KV__TRANSPORTS": "[shm"})


def test_both_ports_may_be_left_to_the_machine() -> None:
    assert load_config(overrides={"server.port": 0, "server.grpc_port": 0}, environ={}).server.port == 0


def test_a_mistake_on_the_command_line_is_said_to_be_there() -> None:
    with pytest.raises(ConfigError, match=r"prefill \(from command line\).*-1"):
        load_config(overrides={"prefill": -1}, environ={})


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, "prefill: none\ndecode: 99\n"), environ={})
    assert len(error.value.message.splitlines()) == 2


def test_a_value_where_a_section_belongs_is_named() -> None:
    with pytest.raises(ConfigError, match=r"kv\.block_tokens \(from command line\): 'kv' is a value, not a section"):
        load_config(overrides={"kv": 3, "kv.block_tokens": 64}, environ={})


@pytest.mark.parametrize(("text", "complaint"), [("- a\n- b\n", "mapping"), ("a: [", "not YAML")])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(write(tmp_path, text), environ={})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        load_config(tmp_path / "gone.yaml", environ={})


SECRET = "0123456789abcdef"


@pytest.mark.parametrize("shown", [repr, str, lambda config: str(config.model_dump(mode="json")), lambda config: config.model_dump_json()])
def test_the_clusters_secret_is_never_shown(shown: Callable[[ClusterConfig], str]) -> None:
    config = load_config(environ={"SPRINGTIDE_CLUSTER_SECRET": SECRET})
    assert config.cluster_secret is not None and config.cluster_secret.get_secret_value() == SECRET
    assert SECRET not in shown(config)


def test_a_secret_that_is_too_short_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigError, match=r"cluster_secret \(from SPRINGTIDE_CLUSTER_SECRET\).*at least 16") as caught:
        load_config(environ={"SPRINGTIDE_CLUSTER_SECRET": "too-short"})
    assert "too-short" not in str(caught.value)


def test_a_secret_on_the_command_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="SPRINGTIDE_CLUSTER_SECRET"):
        load_config(overrides={"cluster_secret": SECRET}, environ={})


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "[::]", ""])
def test_an_address_that_is_no_machines_is_refused(address: str) -> None:
    """It would be announced to the other machines."""
    with pytest.raises(ConfigError, match="name the address at which other machines reach this one"):
        load_config(overrides={"address": address}, environ={})


@pytest.mark.parametrize("address", ["fd00::a", "[fd00::a]", "FD00:0::000A"])
def test_an_address_of_ipv6_is_one_however_it_is_written(address: str) -> None:
    config = load_config(overrides={"address": address, "join_hosts": [address]}, environ={})
    assert config.address == "fd00::a" and config.join_hosts == ("fd00::a",)
