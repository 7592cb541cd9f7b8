"""announced.py CONFIG ROLE: whether the pod's process of this role is in the cluster's membership, which it is as long as it can serve.

While Valkey cannot be asked it counts as if it were: the cluster goes on with the members that it had, and so should its pods.
`springtide.membership` is not asked, for it takes longer to import than an answer.
"""

import asyncio
import os
import sys
from pathlib import Path

import yaml

from springtide.valkey import UNREACHABLE, ValkeyClient, member_key


async def announced(url: str, key: str) -> bool:
    async with ValkeyClient.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0) as client:
        try:
            return bool(await client.exists(key))
        except UNREACHABLE:
            return True


config, role, name = yaml.safe_load(Path(sys.argv[1]).read_text()), sys.argv[2], os.environ["POD_NAME"]
sys.exit(0 if asyncio.run(announced(config["redis_url"], member_key(config["cluster"], role, name))) else f"{role} {name} is not announced")
