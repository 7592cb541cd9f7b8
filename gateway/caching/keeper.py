"""Looks after context caches: claims those that are due, does what the core says of each (`Look`), and has computed what nobody holds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gateway import events as ev
from gateway import metrics
from gateway.caching import core
from gateway.caching.agenda import Claim, Errand
from gateway.caching.catalogue import Catalogue
from gateway.caching.context import ContextCache, Status, content_from
from gateway.caching.stores import Stores
from gateway.runner import Runner
from springtide.errors import InvalidRequest, SpringtideError, Unavailable
from springtide.ids import BlockKey, NodeId, RequestId, new_id
from springtide.protocol.outputs import PromptLogprobs, SampledToken
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.scheduling import Terms
from springtide.supervision import end, supervised

logger = logging.getLogger(__name__)

LOOK_FOR_DUE_EVERY_S = 1.0
CLAIM_S = 15.0
"""After so long a gateway that has died while it looked at a cache is followed by another."""
NOT_SEEN_S = 1.5 * core.LOOK_EVERY_S
"""Who has not been looked at here for so long is looked after by another gateway."""
PLACES = {Errand.LOOK: 64, Errand.WORK: 8}
"""How many there are of either at once, of a tenant at most half of that. Further ones are left to other gateways, or to the next turn."""


class Computer:
    """Computes prompts, of which nobody reads what follows from them."""

    def __init__(self, runner: Runner, on_computed: Callable[[str, int, int], None], patience_s: float) -> None:
        """`on_computed` is told of each prompt's tenant, tokens, and how many of these were found in the pool. `patience_s`: as of
        Generation."""
        self._runner = runner
        self._on_computed = on_computed
        self._patience_s = patience_s

    async def compute(self, tenant: str, token_ids: Sequence[int]) -> NodeId:
        """The node in whose store the prompt's blocks are then. Raises what the request fails with: `Unavailable` of code `no_progress`
        when nothing more of it was computed for long."""
        request_id, sampling = RequestId(new_id("context-cache")), SamplingParams(max_tokens=1, temperature=0.0)
        terms, patience_s = Terms(idle=True), self._patience_s
        generation = ev.Generation(request_id, token_ids, sampling, tenant, terms, prompt_only=True, patience_s=patience_s)
        ended = asyncio.get_running_loop().create_future()
        self._runner.launch(generation, _NobodyReads(ended))
        try:
            reply = await ended
        except asyncio.CancelledError:
            self._runner.cancel(request_id)
            raise
        if isinstance(reply, ev.Failed):
            raise reply.error
        if not isinstance(reply, ev.Finished) or reply.prompt_at is None:
            raise Unavailable("the computation of a context has ended before its time", code="not_computed")
        self._on_computed(tenant, len(token_ids), reply.cached_tokens)
        return reply.prompt_at.node_id


class _NobodyReads:
    """Takes an output, and tells how it ended."""

    def __init__(self, ended: asyncio.Future[ev.Finished | ev.Failed | ev.Cancelled]) -> None:
        self._ended = ended

    def prompt(self, logprobs: PromptLogprobs) -> None:
        """Takes what nobody has asked for."""

    def accepted(self) -> None:
        """Nobody waits for it."""

    def emit(self, tokens: Sequence[SampledToken], cached_tokens: int) -> bool:
        return False

    def end(self, reply: ev.Finished | ev.Failed | ev.Cancelled) -> None:
        if not self._ended.done():
            self._ended.set_result(reply)


class LookedAfter:
    """The caches that this gateway has looked at of late, for the metrics: others look at one after another has."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[float, Status, int]] = {}
        """When, its status and its tokens; who was seen last at the end."""
        self._caches: Counter[Status] = Counter()
        self._tokens: Counter[Status] = Counter()

    def see(self, cache: ContextCache, now: float) -> None:
        self.lose(cache.tenant, cache.cache_id)
        status = cache.status(now)
        self._seen[cache.tenant, cache.cache_id] = now, status, cache.tokens
        self._caches[status] += 1
        self._tokens[status] += cache.tokens

    def lose(self, tenant: str, cache_id: str) -> None:
        """It is there no more, or looked at by others."""
        if (seen := self._seen.pop((tenant, cache_id), None)) is not None:
            _, status, tokens = seen
            self._caches[status] -= 1
            self._tokens[status] -= tokens

    def show(self, now: float) -> None:
        while self._seen:
            (tenant, cache_id), (seen_at, _, _) = next(iter(self._seen.items()))
            if now - seen_at < NOT_SEEN_S:
                break
            self.lose(tenant, cache_id)
        for status in Status:
            metrics.CONTEXT_CACHES.labels(status.value).set(self._caches[status])
            metrics.CONTEXT_CACHE_TOKENS.labels(status.value).set(self._tokens[status])


class Keeper:
    """This gateway's part in looking after all context caches of the cluster."""

    def __init__(self, catalogue: Catalogue, stores: Stores, computer: Computer, now: Callable[[], float] = time.time) -> None:
        """`now` is Unix time."""
        self._catalogue = catalogue
        self._stores = stores
        self._computer = computer
        self._now = now
        self._agenda = catalogue.agenda
        self._looks: dict[asyncio.Task[None], Claim] = {}
        """Those that work too."""
        self._looked_after = LookedAfter()
        self._due = asyncio.Event()
        self._stores_at = float("-inf")
        """When the stores were last looked at, on the event loop's clock."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = supervised(self._run, "context-cache-keeper")

    def hurry(self) -> None:
        """Something is due now."""
        self._due.set()

    async def close(self) -> None:
        """What this gateway looked at is due at once, for another."""
        claims = list(self._looks.values())
        await end(*self._looks, self._task)
        try:
            for claim in claims:
                await self._agenda.put_back(claim, self._now())
        except Unavailable as error:
            logger.info("what was being looked at is left for others: %s", error.message)
        await self._stores.close()

    async def _run(self) -> None:
        while True:
            self._due.clear()
            try:
                await self._turn()
            except Unavailable as error:
                logger.debug("context caches cannot be looked after: %s", error.message)
            try:
                async with asyncio.timeout(LOOK_FOR_DUE_EVERY_S):
                    await self._due.wait()
            except TimeoutError:
                continue

    async def _turn(self) -> None:
        loop_now = asyncio.get_running_loop().time()
        if loop_now - self._stores_at >= LOOK_FOR_DUE_EVERY_S:
            self._stores_at = loop_now
            await self._stores.look()
        now = self._now()
        self._looked_after.show(now)
        if (woken := await self._agenda.stores_changed(self._stores.word, now)) > 0:
            logger.info("the stores are others than before: %d context caches are looked at", woken)
        for errand, places in PLACES.items():
            held = self._held(errand)
            free = places - held.total()
            for claim in await self._agenda.claim(errand, now, now + CLAIM_S, free, places // 2, held) if free else ():
                await self._begin(claim)

    def _held(self, errand: Errand) -> Counter[str]:
        """How many places each tenant has."""
        return Counter(claim.tenant for claim in self._looks.values() if claim.errand is errand)

    async def _begin(self, claim: Claim) -> None:
        under_way = next((task for task, other in self._looks.items() if replace(claim, until=other.until) == other), None)
        if under_way is not None and claim.errand is Errand.WORK:
            # It could not be renewed in time.
            self._looks[under_way] = claim
            return
        if under_way is not None:
            # Wanted again while it is looked at here: once more when that is over.
            await self._agenda.renew(claim, self._now() + LOOK_FOR_DUE_EVERY_S)
            return
        task = asyncio.create_task(self._look(claim), name=f"{claim.errand} {claim.cache_id}")
        self._looks[task] = claim
        task.add_done_callback(self._looked)

    def _looked(self, task: asyncio.Task[None]) -> None:
        claim = self._looks[task]
        held, places = self._held(claim.errand), PLACES[claim.errand]
        if held.total() == places or held[claim.tenant] >= places // 2:
            self._due.set()  # there is a place again
        del self._looks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            # The claim runs out, and somebody looks again.
            level = logging.INFO if isinstance(error, SpringtideError) else logging.ERROR
            logger.log(level, "a look at a context cache has failed: %s", error, exc_info=None if level == logging.INFO else error)

    async def _look(self, claim: Claim) -> None:
        cache = await self._catalogue.get(claim.tenant, claim.cache_id)
        if cache is None:
            self._looked_after.lose(claim.tenant, claim.cache_id)
            await self._agenda.put_back(claim, None)
            return
        self._looked_after.see(cache, self._now())
        keys = await self._catalogue.keys(claim.tenant, claim.cache_id)
        uses = await self._catalogue.uses(claim.tenant, claim.cache_id)
        works = claim.errand is Errand.WORK
        doing = _Doing(self._catalogue, self._stores, self._computer, cache, keys, uses, works, self._now)
        renewing = asyncio.create_task(self._renew(claim, doing))
        try:
            rest = await doing.run()
        finally:
            await end(renewing)
        work_at = self._now() if rest.works else None
        await self._agenda.put_back(self._looks.get(_this_task(), claim), rest.until, work_at)
        if rest.works:
            self.hurry()

    async def _renew(self, claim: Claim, doing: _Doing) -> None:
        """Keeps the claim until it is somebody else's. What is deleted, found elsewhere or over by then is not computed to its end."""
        task = next(task for task, claimed in self._looks.items() if claimed == claim)
        while True:
            await asyncio.sleep(CLAIM_S / 3)
            try:
                renewed = await self._agenda.renew(self._looks[task], self._now() + CLAIM_S)
                if renewed is None:
                    doing.compute_no_more(core.Gone())
                    return
                self._looks[task] = renewed
                cache = await self._catalogue.get(claim.tenant, claim.cache_id) if doing.computes else None
            except Unavailable:
                continue
            if cache is not None and cache.expired(self._now()):
                doing.compute_no_more(core.Postponed())


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None, "looks are tasks"
    return task


class _Doing:
    """Does what one look says, and tells it what came of it."""

    def __init__(
        self,
        catalogue: Catalogue,
        stores: Stores,
        computer: Computer,
        cache: ContextCache,
        keys: Sequence[BlockKey],
        uses: Mapping[NodeId, int],
        works: bool,
        now: Callable[[], float],
    ) -> None:
        self._catalogue = catalogue
        self._stores = stores
        self._computer = computer
        self._cache = cache
        self._keys = keys
        self._uses = uses
        self._works = works
        self._now = now
        self._events: asyncio.Queue[core.Event | Exception] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pinning: dict[NodeId, asyncio.Task[None]] = {}
        self._computing: asyncio.Task[None] | None = None

    @property
    def computes(self) -> bool:
        """It waits for nothing else than to be computed."""
        return self._computing is not None and not self._computing.done()

    def compute_no_more(self, why: core.Gone | core.Postponed) -> None:
        """Has no effect where it is not being computed."""
        if self.computes:
            self._events.put_nowait(why)

    async def run(self) -> core.Rest:
        """When the cache is due again, and for what."""
        look = core.Look(self._cache, self._works)
        self._events.put_nowait(core.Begun(self._stores.seen, self._uses))
        try:
            while True:
                event = await self._events.get()
                if isinstance(event, Exception):
                    raise event
                for action in look.handle(event, self._now()):
                    if isinstance(action, core.Rest):
                        return action
                    await self._do(action)
        finally:
            await end(*self._tasks)

    async def _do(self, action: core.Action) -> None:
        match action:
            case core.Pin(node_id, strength, ttl_s):
                self._pinning[node_id] = self._spawn(self._stores.pin(node_id, self._cache, self._keys, strength, ttl_s))
            case core.Unpin(node_id):
                if (pinning := self._pinning.get(node_id)) is not None:
                    await asyncio.wait([pinning])
                await self._stores.unpin(node_id, self._cache.pin_id)
            case core.ForgetUses(node_id):
                await self._catalogue.forget_uses(self._cache.tenant, self._cache.cache_id, node_id)
            case core.Copy(node_id, sources):
                self._spawn(self._stores.copy(node_id, self._keys, sources))
            case core.Compute():
                self._computing = self._spawn(self._compute())
            case core.Save(kept):
                cache = self._cache
                logger.info("context cache %s of %r is %s, in %s", cache.cache_id, cache.tenant, kept.status.value, sorted(kept.held))
                if await self._catalogue.keep(cache.tenant, cache.cache_id, kept, self._now()) is None:
                    self._events.put_nowait(core.Gone())

    def _spawn(self, work: Coroutine[Any, Any, core.Event]) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                self._events.put_nowait(await work)
            except Exception as error:  # the look fails with it
                self._events.put_nowait(error)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _compute(self) -> core.Computed | core.NotComputed | core.Postponed:
        cache = self._cache
        try:
            raw = await self._catalogue.content(cache.tenant, cache.cache_id)
            if raw is None:
                return core.NotComputed("its content is not there any more", core.Failure.NEVER)
            content = await asyncio.to_thread(content_from, raw)
            node_id = await self._computer.compute(cache.tenant, content.token_ids)
            await self._catalogue.count(cache, creation_tokens=len(content.token_ids))
        except InvalidRequest as error:
            return core.NotComputed(error.message, core.Failure.NEVER)
        except SpringtideError as error:
            # Which node failed, and where it is, is not for whoever looks at the cache.
            logger.info("context cache %s is not computed: %s", cache.cache_id, error.message)
            if error.code == "no_progress":
                return core.Postponed("it waits for idle capacity, of which there was none for long")
            failure = core.Failure.BREAKDOWN if error.code == "node_lost" or error.http_status == 500 else core.Failure.NOT_NOW
            return core.NotComputed("it could not be computed just now, and is tried again", failure)
        store = self._stores.store(node_id)
        if store is None:
            return core.NotComputed("its store was lost, and it is computed again", core.Failure.NOT_NOW)
        return core.Computed(store)
