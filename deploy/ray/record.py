"""What the placer tells nodes: a signed record in the cluster's Valkey, from which each knows whether it is wanted, and a later placer what
there is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from deploy.ray.placement import Phase, PlacedNode
from springtide.credentials import Credentials
from springtide.errors import Unavailable
from springtide.valkey import ValkeyClient, asked, bytes_of


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """What the placer says. It says so again and again, each time with another `beat`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    placer_pid: int
    beat: Annotated[int, Field(ge=0)]
    nodes: Mapping[str, PlacedNode]
    """By their names."""

    def wants(self, name: str, placement: str) -> bool:
        """Whether this node, and no other of the name, is to go on."""
        return self.has(name, placement) and self.nodes[name].phase is not Phase.LEAVING

    def has(self, name: str, placement: str) -> bool:
        """Whether it is this node, and no other, that has the name."""
        node = self.nodes.get(name)
        return node is not None and node.placement == placement


_RECORD = TypeAdapter(PlacementRecord)


class PlacementBook:
    """Where the record is."""

    def __init__(self, client: ValkeyClient, cluster: str, credentials: Credentials) -> None:
        self._client = client
        self._key = f"{cluster}:ray-placement"
        self._credentials = credentials

    async def write(self, record: PlacementRecord) -> None:
        """Raises Unavailable."""
        said = _RECORD.dump_json(record)
        await asked(self._client.set(self._key, self._credentials.signature(said).encode() + b"\n" + said))

    async def read(self) -> PlacementRecord | None:
        """None where there is none, or one that nobody of the cluster has written. Raises Unavailable."""
        found = await asked(self._client.get(self._key))
        signature, _, said = bytes_of(found).partition(b"\n")
        if not said or not self._credentials.vouches_for(said, signature):
            return None
        try:
            return _RECORD.validate_json(said)
        except (ValidationError, json.JSONDecodeError):
            return None


async def placer_in(book: PlacementBook) -> int | None:
    """The process id of the placer that writes there; None where nobody has."""
    try:
        record = await book.read()
    except Unavailable:
        return None
    return None if record is None else record.placer_pid
