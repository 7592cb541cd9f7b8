"""What a machine that joins and the head tell each other, as JSON over HTTPS."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from springtide.choices import NodeRole
from springtide.ids import InstanceId, engine_of

MAX_BODY_BYTES = 64 << 10
_NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")


def checked_name(name: str) -> str:
    """The name, which a node may have. Raises ValueError where none may."""
    if _NODE_NAME.fullmatch(name) is None:
        raise ValueError("a name has at most 64 letters and digits of ASCII, and '.', '_' and '-' between them")
    if (engine := engine_of(InstanceId(name))) != name:
        raise ValueError(f"so an instance {engine!r} is called as one that prefills")
    return name


class _Word(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class JoinRequest(_Word):
    """`POST /join`, with a token; or with a certificate, of a machine that has been let in before and comes back."""

    token: str = Field("", repr=False)
    role: NodeRole
    name: Annotated[str, AfterValidator(checked_name)]
    request: str
    """PEM: a certificate request with the machine's addresses."""
    certificate: str = ""
    """PEM: the one from before; it is to be good still."""
    signature: str = ""
    """Hexadecimal: of `request`, by the key of `certificate`."""


class JoinReply(_Word):
    certificate: str
    """PEM: the chain. Empty where the cluster has given certificates, and this machine is to have been given one too."""
    authorities: str
    cluster_secret: str = Field(repr=False)
    settings: dict[str, Any]
    """The cluster's configuration, without what is each machine's own."""
    model_info: dict[str, Any]
    """As of springtide.modelinfo.ModelInfo."""
    redis_url: str
    """Where Valkey is."""
    certified_valkey: bool
    """It wants to be shown a certificate of the cluster's."""


class RenewRequest(_Word):
    """`POST /renew`."""

    certificate: str
    """PEM: the one that is to be replaced."""
    request: str
    """As of JoinRequest."""
    signature: str
    """Hexadecimal: of `request`, by the key of `certificate`."""


class RenewReply(_Word):
    certificate: str
    authorities: str
