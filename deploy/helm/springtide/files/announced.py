"""announced.py CONFIG ROLE: whether the pod's process of this role is in the cluster's membership, which it is as long as it can serve.

While Valkey cannot be asked it counts as if it were: the cluster goes on with the members that it had, and so should its pods.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any, cast

import yaml

from springtide.membership import MemberRole, Membership


async def announced(config: dict[str, Any], role: MemberRole, name: str) -> bool:
    membership = Membership(config["redis_url"], config["cluster"], config["conductor"]["lease_s"])
    try:
        return await membership.has(role, name) is not False
    finally:
        await membership.close()


config, role, name = yaml.safe_load(Path(sys.argv[1]).read_text()), cast(MemberRole, sys.argv[2]), os.environ["POD_NAME"]
sys.exit(0 if asyncio.run(announced(config, role, name)) else f"{role} {name} is not announced")
