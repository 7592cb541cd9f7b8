"""Which of a cluster's processes are ready: Valkey when it answers, the placer when it tells nodes what is wanted, who watches from outside
when it says so, the others when they are listed in the membership; placer and others with the process id that the supervisor gave them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from types import TracebackType

import httpx
from redis.exceptions import RedisError

from deploy.commands.conductors import views
from deploy.local.plan import ProcessSpec, client_host
from deploy.ray.record import PlacementBook, placer_in
from springtide.config import ClusterConfig
from springtide.credentials import credentials_of
from springtide.membership import Membership
from springtide.valkey import ValkeyClient

GATEWAY_POLL_S = 0.1


class ReadinessProbe:
    """Asks; keeps no state but its connections."""

    def __init__(self, config: ClusterConfig) -> None:
        assert config.redis_url is not None, "the configuration must be resolved"
        self._valkey = ValkeyClient.from_url(config.redis_url, socket_timeout=1.0, socket_connect_timeout=1.0)
        self._credentials = credentials_of(config)
        self._placement = PlacementBook(self._valkey, config.cluster, self._credentials)
        self._membership = Membership.of(config, self._credentials)
        # It asks a child of this process, and tells it nothing: whose name is in the certificate is of no interest.
        self._http = httpx.AsyncClient(timeout=2.0, trust_env=False, verify=False)
        self._only_certified = config.server.tls_client_ca is not None
        scheme = "http" if config.server.tls_certificate is None else "https"
        self.url = f"{scheme}://{client_host(config.server.host)}:{config.server.port}"

    async def __aenter__(self) -> ReadinessProbe:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._http.aclose()
        await self._membership.close()
        await self._valkey.aclose()

    async def ready(self, waiting: Iterable[tuple[ProcessSpec, int]]) -> set[str]:
        """The names of those of the (process, its pid) pairs that are ready."""
        waiting = list(waiting)
        names = set()
        for spec, pid in waiting:
            if spec.role == "valkey" and await self._valkey_answers():
                names.add(spec.name)
            if spec.role == "placer" and await placer_in(self._placement) == pid:
                names.add(spec.name)
            if spec.ready_url and await self._answers(spec.ready_url):
                names.add(spec.name)
        if any(spec.role not in ("valkey", "placer", "observer") for spec, _ in waiting):
            members = await self._membership.members() or []
            present = {(member.role, member.member_id, member.pid) for member in members}
            names |= {spec.name for spec, pid in waiting if (spec.role, spec.member_id, pid) in present}
        return names

    async def wait_for_gateway(self) -> None:
        """Returns once the cluster takes requests."""
        while not await self._gateway_ready():  # noqa: ASYNC110 - another process makes it so
            await asyncio.sleep(GATEWAY_POLL_S)

    async def _gateway_ready(self) -> bool:
        if self._only_certified:
            # No certificate for the gateway to let us in; it is announced, so the Conductor's word will do.
            found = await views(await self._membership.members() or [], self._credentials)
            return any(view.status is not None and view.status.ready for view in found)
        with contextlib.suppress(httpx.HTTPError):
            return (await self._http.get(self.url + "/ready")).status_code == httpx.codes.OK
        return False

    async def _answers(self, url: str) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await self._http.get(url)).is_success
        return False

    async def _valkey_answers(self) -> bool:
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            return bool(await self._valkey.ping())
        return False
