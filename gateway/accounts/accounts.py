"""The accounts of a gateway's callers: who they are by their credentials, whether they may ask now, and what they have used."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Literal

import redis.asyncio as redis

from gateway import metrics
from gateway.accounts.allowance import MAX_NAME_LENGTH, Allowance, Caller, digest_of
from gateway.accounts.limiter import NO_RECEIPT, Claim, Limiter, Receipt, Standing, Verdict
from gateway.accounts.register import Register, RegisterCopy
from gateway.accounts.usage import Counts, Meter, UsageBook, UsageRow, UsageTally, UsageWriter, today
from springtide.errors import InvalidRequest, Overloaded, Unauthenticated, Unavailable
from springtide.protocol.usage import Usage

_CONFIGURED = "config-"
"""How the ids of keys begin that are in the configuration; behind it come the first digits of their digests."""
KEY_HEADERS = ("x-api-key", "x-goog-api-key")
"""In which other APIs' clients send their keys, as they are."""
RATE_HEADERS = tuple(f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset"))


TokenKind = Literal["tokens", "batch_tokens"]
"""Those of requests that somebody waits for, and those of lines of batches."""


class RateLimited(Overloaded):
    """The caller has had as much as it may have for now."""


class Accounts:
    """Everything about the callers of one gateway."""

    def __init__(
        self,
        client: redis.Redis,
        cluster: str,
        api_keys: Mapping[str, str],
        *,
        require_api_keys: bool = False,
        max_streams: int | None = None,
        operators: Collection[str] = (),
    ) -> None:
        """`api_keys`: the tenants of the configuration's keys, by digest, and `operators` those of them whose keys are operators'.
        `max_streams`: most requests of one tenant that are being answered here at once."""
        self._configured = api_keys
        self._operators = operators
        self._required = require_api_keys
        self._max_streams = max_streams
        self._copy = RegisterCopy(Register(client, cluster))
        self._streams: Counter[str] = Counter()
        self._settling: set[asyncio.Task[None]] = set()
        self._tally = UsageTally()
        self._writer = UsageWriter(self._tally, UsageBook(client, cluster), today)
        self.limiter = Limiter(client, cluster)

    async def start(self) -> None:
        await self._copy.start()
        self._writer.start()

    async def close(self) -> None:
        """Writes down what was used. Idempotent."""
        await self._copy.close()
        await asyncio.gather(*self._settling, return_exceptions=True)
        await self._writer.close()

    # ---- who asks ----

    def caller(self, authorization: str, named: str = "") -> Caller:
        """Whose a request is with this `Authorization` that says it is `named`'s ("" for nobody's). Raises Unauthenticated, InvalidRequest
        when it names another tenant than its key's, and Unavailable while that cannot be told."""
        if len(named) > MAX_NAME_LENGTH:
            raise InvalidRequest(f"tenant: a tenant's name may have {MAX_NAME_LENGTH} characters, not {len(named)}", param="tenant")
        if not (self._configured or self._required or self._copy.has_keys):
            if not self._copy.read:
                raise Unavailable("whether API keys are wanted cannot be told before Valkey has been asked", code="not_ready")
            return Caller(named, of_tenant=self._copy.tenant(named), operator=not named)
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise self._refused("an API key is required; send it as `Authorization: Bearer KEY`")
        caller = self._known(digest_of(key.strip()))
        if named not in ("", caller.tenant):
            raise InvalidRequest(f"tenant: this API key is {caller.tenant!r}'s, not {named!r}'s", param="tenant", code="wrong_tenant")
        return caller

    def _known(self, digest: str) -> Caller:
        tenant = self._configured.get(digest)
        if tenant is not None:
            key_id = _CONFIGURED + digest.removeprefix("sha256:")[:12]
            return Caller(tenant, key_id, of_tenant=self._copy.tenant(tenant), operator=tenant in self._operators)
        key = self._copy.key(digest)
        if key is None:
            if not self._copy.read:
                raise Unavailable("this API key cannot be looked up before Valkey has been asked", code="not_ready")
            raise self._refused("this API key is not known")
        if not key.usable(time.time()):
            raise self._refused("this API key has been revoked" if key.revoked_at is not None else "this API key has expired")
        return Caller(key.tenant, key.key_id, key.allowance, self._copy.tenant(key.tenant), key.operator)

    @staticmethod
    def _refused(message: str) -> Unauthenticated:
        metrics.UNAUTHENTICATED.inc()
        return Unauthenticated(message, code="invalid_api_key")

    def allowance(self, tenant: str) -> Allowance:
        """A tenant's own, its keys' aside."""
        return self._copy.tenant(tenant)

    def key_allowance(self, key_id: str) -> Allowance:
        """A key's own; of a key of the configuration, and without a key, there is none."""
        return self._copy.allowance(key_id)

    # ---- what they ask for ----

    def charge(self, caller: Caller) -> Charge:
        """For one API request, to be ended in any case."""
        return Charge(self, caller)

    def enter(self, tenant: str) -> None:
        """One more request of the tenant is being answered. Raises Overloaded."""
        if self._max_streams is not None and tenant and self._streams[tenant] >= self._max_streams:
            raise Overloaded(
                f"tenant {tenant!r} has {self._max_streams} requests being answered by this gateway, as many as it may have at once "
                "(server.max_streams_per_tenant)",
                retry_after_s=1.0,
                reason="too_many_streams",
            )
        self._streams[tenant] += 1

    def leave(self, tenant: str) -> None:
        self._streams[tenant] -= 1
        if not self._streams[tenant]:
            del self._streams[tenant]

    def count(self, row: UsageRow, counts: Counts) -> None:
        """What was used without an answer."""
        self._tally.add(today(), row, counts)

    def meter(self, row: UsageRow, receipt: Receipt, served: Callable[[], Usage]) -> Callable[[], None]:
        """Counts an answer's usage from now on; what is returned is to be called at its end, and settles what was taken for it."""
        meter = Meter(row, served)
        self._tally.open(meter)

        def end() -> None:
            self._tally.close(meter, today())
            self.settle(receipt, served())

        return end

    def settle(self, receipt: Receipt, served: Usage) -> None:
        """Corrects what was taken of the limits by what was served in the end, beside whoever asks for it."""
        over = served.prompt_tokens + served.completion_tokens - receipt.tokens
        if receipt.windows and over:
            task = asyncio.create_task(self.limiter.settle(receipt.windows, over, receipt.second), name="settle rate limits")
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)


class Charge:
    """What one API request takes of its caller's limits."""

    def __init__(self, accounts: Accounts, caller: Caller) -> None:
        self._accounts = accounts
        self._caller = caller
        self._entered = False
        self.headers: dict[str, str] = {}
        """How the limits stand, as far as there are any."""

    async def begin(self, model: str) -> None:
        """The request counts from now on. Raises ModelNotFound when this caller may not use the model, RateLimited when it has had its
        requests, and Overloaded when as many are being answered as may be."""
        self._caller.check_model(model)
        self._accounts.enter(self._caller.tenant)
        self._entered = True
        await self._take("requests", 1)

    async def take_tokens(self, amount: int, kind: TokenKind = "tokens") -> Receipt:
        """Those of its prompts. Raises RateLimited when there are not so many left, InvalidRequest when there never are."""
        limits = self._limits(kind)
        least = min(limits.values(), default=amount)
        if amount > least:
            raise InvalidRequest(
                f"the request has {amount} prompt tokens, but at most {least} {_words(kind)} a minute are allowed",
                code="rate_limit_exceeded",
            )
        verdict = await self._take(kind, amount)
        if verdict is None:
            return NO_RECEIPT
        return Receipt(tuple(_window(kind, subject) for subject in limits), amount, verdict.second)

    def end(self) -> None:
        """Idempotent."""
        if self._entered:
            self._entered = False
            self._accounts.leave(self._caller.tenant)

    async def _take(self, kind: str, amount: int) -> Verdict | None:
        limits = self._limits(kind)
        if not limits:
            return None
        verdict = await self._accounts.limiter.take([Claim(_window(kind, subject), limit, amount) for subject, limit in limits.items()])
        tightest = min(verdict.standings, key=lambda standing: standing.remaining)
        self.headers |= _headers(kind, tightest)
        if not verdict.granted:
            metrics.RATE_LIMITED.labels(kind).inc()
            raise self._exceeded(kind, amount, limits, verdict)
        return verdict

    def _limits(self, kind: str) -> dict[str, int]:
        """By whose they are."""
        caller = self._caller
        named = {f"key/{caller.key_id}": caller.of_key, f"tenant/{caller.tenant}": caller.of_tenant}
        limits = {subject: getattr(allowance, f"{kind}_per_minute") for subject, allowance in named.items()}
        return {subject: limit for subject, limit in limits.items() if limit is not None}

    def _exceeded(self, kind: str, amount: int, limits: Mapping[str, int], verdict: Verdict) -> RateLimited:
        subject, standing = max(zip(limits, verdict.standings, strict=True), key=lambda entry: entry[1].wait_s)
        whose = "this API key" if subject.startswith("key/") else f"tenant {self._caller.tenant!r}"
        left = f"{standing.remaining} are left and {amount} {'is' if amount == 1 else 'are'} wanted"
        message = f"rate limit reached: {whose} may have {standing.limit} {_words(kind)} a minute, of which {left}; try again in "
        return RateLimited(f"{message}{math.ceil(standing.wait_s)} s", retry_after_s=standing.wait_s, reason="rate_limit_exceeded")


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _window(kind: str, subject: str) -> str:
    return f"{kind}:{subject}"


def _headers(kind: str, standing: Standing) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{kind}": str(standing.limit),
        f"x-ratelimit-remaining-{kind}": str(standing.remaining),
        f"x-ratelimit-reset-{kind}": f"{standing.reset_s:.3f}s",
    }
