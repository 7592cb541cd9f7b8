"""Which of the machine's cards an engine's processes run on."""

from __future__ import annotations

import logging
import re
from collections import Counter
from typing import NamedTuple

from engine.device.base import Device, count_cards, find
from springtide.config import ClusterConfig
from springtide.errors import ConfigError
from springtide.process import ProcessArguments
from springtide.protocol.instances import Role

logger = logging.getLogger(__name__)

_INSTANCE = re.compile(r"(?:(?P<kind>prefill|decode|instance)-(?P<number>\d+))?.*?(?:\.stage-(?P<stage>\d+))?")


def devices_of(arguments: ProcessArguments, role: Role) -> list[Device | None]:
    """The devices of the ranks of the process; None for those that run on the CPU. An engine that has switched its role stays on the cards
    that it had. Processes that share a card have equal parts of its memory.

    Raises ConfigError when CUDA is asked for and there is none, or fewer cards than ranks."""
    named = _INSTANCE.fullmatch(arguments.instance_id)
    assert named is not None, "the pattern matches everything"
    config, number = arguments.config, int(named["number"] or 0)
    # Instances that do both come after those that decode alone.
    own = _Engine(Role.DECODE, config.decode + number) if named["kind"] == "instance" else _Engine(Role(named["kind"] or role), number)
    if named["kind"] is None or own not in _engines(config):
        # As in a pod, on a machine that has joined or on a Ray node, whose names number the cluster's engines.
        alone = {"prefill": int(role is Role.PREFILL), "decode": int(role is Role.DECODE), "instances": 0}
        config, own = config.model_copy(update=alone), _Engine(role, 0)
    total = count_cards(config.device)
    cards = _cards(config, own, role, total or 1)[int(named["stage"] or 0) % config.prefill_node.stages_of_node]
    if total and len(set(cards)) < len(cards):
        message = (
            f"{role}_node.tensor_parallel: {len(cards)} ranks need a card each, but have {', '.join(map(str, sorted(set(cards))))} of the "
            f"machine's {total}: lower it, or name as many in {own.kind}_node.devices"
        )
        if config.device == "cuda":
            raise ConfigError(message)
        logger.warning("%s; they run on the CPU", message)
        total = 0
    if not total:
        return [None] * len(cards)
    users = _users(config, own, role, total)
    step_graphs = config.decode_node.max_batch if role is Role.DECODE and config.decode_node.cuda_graphs else 0
    return [find(config.device, card, config.device_memory / users[card], step_graphs) for card in cards]


class _Engine(NamedTuple):
    """An engine as it was started."""

    kind: Role
    number: int


def _engines(config: ClusterConfig) -> list[_Engine]:
    """Those that `springtide up` starts on a machine. Any other engine has the machine, or what it sees of its cards, to itself."""
    counts = {Role.PREFILL: config.prefill, Role.DECODE: config.decode + config.instances}
    return [_Engine(role, number) for role, count in counts.items() for number in range(count)]


def _cards(config: ClusterConfig, engine: _Engine, role: Role, total: int) -> list[list[int]]:
    """Which of the `total` cards each rank has, in each process of an engine that has `role`. It keeps to those that it was started on."""
    prefill, decode = config.prefill_node, config.decode_node
    sizes = {Role.PREFILL: prefill.engines_of_node, Role.DECODE: decode.engines_of_node}
    before, chosen = (0, prefill.devices) if engine.kind is Role.PREFILL else (config.prefill * sizes[Role.PREFILL], decode.devices)
    size = sizes[engine.kind]
    places = range(engine.number * size, (engine.number + 1) * size)
    own = [before + place if chosen is None else chosen[place % len(chosen)] for place in places]
    stages, degree = (prefill.stages_of_node, prefill.tensor_parallel) if role is Role.PREFILL else (1, decode.tensor_parallel)
    return [[own[(stage * degree + rank) % size] % total for rank in range(degree)] for stage in range(stages)]


def _users(config: ClusterConfig, own: _Engine, role: Role, total: int) -> Counter[int]:
    """How many processes each card has, where all engines but this one, which has `role`, have the roles that they were started in."""
    roles = {engine: engine.kind for engine in _engines(config)} | {own: role}
    return Counter(card for engine, its in roles.items() for ranks in _cards(config, engine, its, total) for card in ranks)
