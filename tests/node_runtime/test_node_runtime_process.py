"""How an engine process comes to its store, and when it gives up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from kvstore.link import StoreLink
from node_runtime import process
from springtide.config import load_config
from springtide.errors import ConfigError, NoMemory
from springtide.ids import InstanceId
from springtide.membership import Member
from springtide.modelinfo import ModelInfo
from springtide.process import ProcessArguments
from springtide.protocol.instances import Role

MODEL = ModelInfo("/model", "tiny", "llama", "fingerprint-1", 8192, 2, 1, 8, 100, (0,))


async def test_an_engine_that_cannot_map_its_stores_arena_ends_instead_of_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_room(*arguments: Any) -> NoReturn:
        raise NoMemory("no room for an arena of 5 bytes in this process: Cannot allocate memory")

    monkeypatch.setattr(StoreLink, "connect", no_room)
    arguments = ProcessArguments(load_config(environ={}), MODEL, tmp_path, "decode-0", "decode-0", "127.0.0.1")
    node: Any = SimpleNamespace(on_notice=lambda notice: None)
    async with asyncio.timeout(10):
        with pytest.raises(ConfigError, match=r"kv\.arena_size: no room for an arena of 5 bytes"):
            await process._connect(arguments, node, 1, asyncio.get_running_loop().create_future())


async def test_an_engine_announces_what_its_model_is_computed_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[Member] = []

    class Listening:
        @classmethod
        def of(cls, *arguments: Any) -> Listening:
            return cls()

        async def announce(self, member: Member) -> None:
            announced.append(member)

    async def set_health(*arguments: Any) -> None:
        pass

    monkeypatch.setattr(process, "Membership", Listening)
    config = load_config(overrides={"redis_url": "redis://127.0.0.1:1", "kv.open_to_strangers": True}, environ={})
    arguments = ProcessArguments(config, MODEL, tmp_path, "decode-0", "decode-0", "127.0.0.1")
    health, link = SimpleNamespace(set=set_health), SimpleNamespace(address="127.0.0.1:2")
    announcement = process._Announcement(arguments, {Role.DECODE: InstanceId("decode-0")}, "torch", "127.0.0.1:1", "127.0.0.1:3", health)
    await announcement.announce(link, 1)  # type: ignore[arg-type]
    assert [(member.member_id, member.details["kernels"]) for member in announced] == [("decode-0", "torch")]
