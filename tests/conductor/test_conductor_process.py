"""`python -m conductor` as it is launched."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import yaml

from springtide.membership import Member, Membership
from springtide.modelinfo import ModelInfo
from springtide.rpc import conductor_pb2
from springtide.rpc.channels import connect
from springtide.rpc.conductor_pb2_grpc import ConductorStub
from tests.support.valkey import new_valkey
from tests.support.waiting import until

MODEL = ModelInfo("/model", "tiny", "llama", "fingerprint-1", 8192, 2, 1, 8, 100, (0,))


async def until_announced(membership: Membership) -> Member:
    (member,) = await until(membership.members) or ()
    return member


async def test_the_process_announces_itself_answers_and_ends_on_sigterm(tmp_path: Path) -> None:
    MODEL.save(tmp_path / "model.json")
    with new_valkey() as valkey:
        settings = {
            "redis_url": valkey.connection_url,
            "server": {"separate_gateway": True},
            "served_model_name": "served",
            "kv": {"open_to_strangers": True},
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
        files = ["--config", tmp_path / "config.yaml", "--model-info", tmp_path / "model.json", "--run-dir", tmp_path]
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "conductor", *files, "--instance-id", "conductor-0")
        membership = Membership(valkey.connection_url, "springtide", 5.0)
        try:
            member = await until_announced(membership)
            assert (member.role, member.member_id, member.pid) == ("conductor", "conductor-0", process.pid)
            async with connect(member.address) as channel:
                status = await ConductorStub(channel).GetCluster(conductor_pb2.GetClusterRequest())
            assert (status.model, status.ready) == ("served", False)
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 10) == 0
            assert await membership.members() == []
        finally:
            if process.returncode is None:
                process.kill()
            await membership.close()
