"""`springtide store`: what the stores of a running cluster hold, and what an operator may do about it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from deploy.commands import store_tables as tables
from deploy.commands.locate import Located, Where, locate
from deploy.commands.store_blocks import NamedPrompt, parse_key_prefix, prompt_keys
from springtide.blocks import KEY_BYTES
from springtide.errors import ConfigError, SpringtideError, Unavailable
from springtide.ids import BlockKey
from springtide.membership import Member
from springtide.rpc import store_pb2 as pb
from springtide.rpc.channels import connect
from springtide.rpc.store_pb2_grpc import StoreStub

TIMEOUT_S = 30.0
"""Stores look at every block for some answers."""
SSD_TIMEOUT_S = 3600.0
"""To read all of a large SSD."""
T = TypeVar("T")
_TTL = re.compile(r"^(\d+(?:\.\d+)?)([smhd]?)$")
_TTL_FACTORS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class NotHeld(SpringtideError):
    """No store has what was named."""


@dataclass(frozen=True, slots=True)
class StoreCommandOptions:
    where: Where
    node_id: str | None
    """One store; None: all."""
    as_json: bool


class Stores:
    """The stores that a command is about, connected."""

    def __init__(self, located: Located, stubs: dict[str, StoreStub]) -> None:
        self.located = located
        self._stubs = stubs

    @classmethod
    @asynccontextmanager
    async def open(cls, options: StoreCommandOptions) -> AsyncIterator[Stores]:
        """Raises Unavailable when the cluster has none, ConfigError when it has none of that name."""
        located = await locate(options.where)
        members = _chosen([member for member in located.members if member.role == "store"], options.node_id)
        channels = {member.member_id: connect(member.address, located.credentials) for member in members}
        try:
            yield cls(located, {node_id: StoreStub(channel) for node_id, channel in channels.items()})
        finally:
            await asyncio.gather(*(channel.close(None) for channel in channels.values()))

    async def ask(self, call: Callable[[StoreStub], Awaitable[T]]) -> dict[str, T]:
        """Asks every store; the answers by node. Those that say NOT_FOUND are left out; when all do, raises NotHeld. Raises what else one
        says."""
        answers = await asyncio.gather(*(_answer(node_id, call(stub)) for node_id, stub in self._stubs.items()))
        found = {node_id: answer for node_id, answer in zip(self._stubs, answers, strict=True) if not isinstance(answer, NotHeld)}
        if not found:
            raise next(answer for answer in answers if isinstance(answer, NotHeld))
        return found

    async def keys(self, prefixes: Sequence[str], prompt: NamedPrompt) -> list[BlockKey]:
        """What the user named. Raises ConfigError or NotHeld, naming what is wrong."""
        keys = await prompt_keys(self.located, prompt) if prompt.given else []
        for prefix in prefixes:
            keys.append(await self._key(parse_key_prefix(prefix)))
        if not keys:
            raise ConfigError("name blocks: by KEY, or by --prompt, --chat or --tokens")
        return keys

    async def _key(self, prefix: str) -> BlockKey:
        if len(prefix) == 2 * KEY_BYTES:
            return BlockKey(bytes.fromhex(prefix))
        request = pb.ListBlocksRequest(key_prefix=prefix, limit=2)
        replies = await self.ask(lambda stub: stub.ListBlocks(request, timeout=TIMEOUT_S))
        found = {chain.key for reply in replies.values() for chain in reply.chains}
        if not found:
            raise NotHeld(f"no store asked holds a block whose key begins with {prefix}")
        if len(found) > 1:
            raise ConfigError(f"{prefix} is ambiguous: keys {', '.join(sorted(key.hex() for key in found))}, and maybe more, begin so")
        return BlockKey(found.pop())


def ls(options: StoreCommandOptions, key_prefix: str, prompt: NamedPrompt, limit: int) -> None:
    async def run(stores: Stores) -> dict[str, pb.ListBlocksReply]:
        keys = await prompt_keys(stores.located, prompt) if prompt.given else []
        request = pb.ListBlocksRequest(key_prefix=parse_key_prefix(key_prefix) if key_prefix else "", limit=limit, keys=keys)
        return await stores.ask(lambda stub: stub.ListBlocks(request, timeout=TIMEOUT_S))

    tables.show_chains(_run(options, run), options.as_json)


def stat(options: StoreCommandOptions) -> None:
    async def run(stores: Stores) -> dict[str, pb.StatReply]:
        return await stores.ask(lambda stub: stub.Stat(pb.StatRequest(), timeout=TIMEOUT_S))

    tables.show_stats(_run(options, run), options.as_json)


def pins(options: StoreCommandOptions) -> None:
    async def run(stores: Stores) -> dict[str, pb.ListPinsReply]:
        return await stores.ask(lambda stub: stub.ListPins(pb.ListPinsRequest(), timeout=TIMEOUT_S))

    tables.show_pins({node_id: list(reply.pins) for node_id, reply in _run(options, run).items()}, options.as_json)


def pin(options: StoreCommandOptions, prefixes: Sequence[str], prompt: NamedPrompt, pin_id: str | None, hard: bool, ttl: str) -> None:
    ttl_ms = round(parse_ttl(ttl) * 1000)

    async def run(stores: Stores) -> dict[str, pb.PinReply]:
        keys = await stores.keys(prefixes, prompt)
        kind = pb.PIN_KIND_HARD if hard else pb.PIN_KIND_SOFT
        request = pb.PinRequest(pin_id=pin_id or default_pin_id(keys), keys=keys, kind=kind, ttl_ms=ttl_ms)
        return await stores.ask(lambda stub: stub.Pin(request, timeout=TIMEOUT_S))

    tables.show_pins({node_id: [reply.pin] for node_id, reply in _run(options, run).items()}, options.as_json)


def unpin(options: StoreCommandOptions, pin_id: str | None, prompt: NamedPrompt) -> None:
    async def run(stores: Stores) -> dict[str, pb.PinReply]:
        if pin_id is None and not prompt.given:
            raise ConfigError("name the pin: its ID, or the --prompt, --chat or --tokens that it was made with")
        request = pb.UnpinRequest(pin_id=pin_id or default_pin_id(await prompt_keys(stores.located, prompt)))
        return await stores.ask(lambda stub: stub.Unpin(request, timeout=TIMEOUT_S))

    tables.show_pins({node_id: [reply.pin] for node_id, reply in _run(options, run).items()}, options.as_json)


def evict(options: StoreCommandOptions, prefixes: Sequence[str], prompt: NamedPrompt, everything: bool) -> None:
    if everything and (prefixes or prompt.given):
        raise ConfigError("--all evicts everything: name no blocks beside it")

    async def run(stores: Stores) -> dict[str, pb.EvictReply]:
        if everything:
            return await stores.ask(lambda stub: stub.Evict(pb.EvictRequest(all=True), timeout=TIMEOUT_S))
        if prompt.given and prefixes:
            raise ConfigError("name either a prompt or keys, not both")
        keys = await stores.keys(prefixes, prompt)
        if prompt.given:
            return await stores.ask(lambda stub: _evict_own(stub, keys))
        return await stores.ask(lambda stub: stub.Evict(pb.EvictRequest(keys=keys), timeout=TIMEOUT_S))

    tables.show_evictions(_run(options, run), options.as_json)


async def _evict_own(stub: StoreStub, keys: Sequence[BlockKey]) -> pb.EvictReply:
    """The blocks that are this prompt's alone, and what continues them. What it shares with others stays theirs."""
    listed = await stub.ListBlocks(pb.ListBlocksRequest(keys=keys), timeout=TIMEOUT_S)
    if not listed.chains:
        return pb.EvictReply()
    chain = listed.chains[0]
    reply: pb.EvictReply = await stub.Evict(pb.EvictRequest(keys=[keys[chain.blocks - chain.own_blocks]]), timeout=TIMEOUT_S)
    return reply


def verify(options: StoreCommandOptions, ssd: bool) -> int:
    """Has the stores verify what they hold, with `ssd` every block there too. Returns the exit code: 0 when every store is sound."""

    async def run(stores: Stores) -> dict[str, pb.VerifyReply]:
        return await stores.ask(lambda stub: stub.Verify(pb.VerifyRequest(ssd=ssd), timeout=SSD_TIMEOUT_S if ssd else TIMEOUT_S))

    replies = _run(options, run)
    tables.show_verdicts(replies, options.as_json)
    return 1 if any(reply.problem for reply in replies.values()) else 0


def default_pin_id(keys: Sequence[BlockKey]) -> str:
    """The same for the same blocks, so that pinning again renews and unpinning finds it."""
    return f"cli-{keys[-1].hex()[:16]}"


def parse_ttl(text: str, option: str = "--ttl") -> float:
    """The seconds in `90s`, `30m`, `12h`, `7d` or a plain number of them. Raises ConfigError, naming the option."""
    match = _TTL.match(text.strip().lower())
    seconds = float(match[1]) * _TTL_FACTORS[match[2]] if match else 0.0
    if seconds <= 0:
        raise ConfigError(f"{option} {text}: write a time such as 90s, 30m, 12h or 7d")
    return seconds


def _run(options: StoreCommandOptions, command: Callable[[Stores], Awaitable[T]]) -> T:
    async def run() -> T:
        async with Stores.open(options) as stores:
            return await command(stores)

    return asyncio.run(run())


def _chosen(members: list[Member], node_id: str | None) -> list[Member]:
    if not members:
        raise Unavailable("the cluster has no store just now")
    if node_id is None:
        return members
    chosen = [member for member in members if member.member_id == node_id]
    if not chosen:
        raise ConfigError(f"--store {node_id}: there is no such store; there are {', '.join(member.member_id for member in members)}")
    return chosen


async def _answer(node_id: str, call: Awaitable[Any]) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        message = f"{node_id}: {error.details()}"
        match error.code():
            case grpc.StatusCode.NOT_FOUND:
                return NotHeld(message)
            case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise SpringtideError(message) from None
            case _:
                raise Unavailable(f"the store of {message}") from None
