"""Looks after context caches: claims those that are due, does what the core says of each (`Look`), and has computed what nobody holds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from gateway import events as ev
from gateway.caching import core
from gateway.caching.catalogue import Catalogue, Claim
from gateway.caching.context import CacheId, ContextCache, content_from
from gateway.caching.stores import Stores
from gateway.runner import Runner
from springtide.errors import InvalidRequest, SpringtideError, Unavailable
from springtide.ids import BlockKey, NodeId, RequestId, new_id
from springtide.protocol.outputs import PromptLogprobs, SampledToken
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.scheduling import Terms
from springtide.supervision import supervised

logger = logging.getLogger(__name__)

LOOK_FOR_DUE_EVERY_S = 1.0
CLAIM_S = 15.0
"""After so long a gateway that has died while it looked at a cache is followed by another."""
MOST_LOOKS = 64
"""At once; further ones are left to other gateways, or to the next turn."""
MOST_COMPUTED = 4
"""At once. Others wait for them, not at the Conductor."""


class Computer:
    """Computes prompts, of which nobody reads what follows from them."""

    def __init__(self, runner: Runner, on_computed: Callable[[str, int, int], None]) -> None:
        """`on_computed` is told of each prompt's tenant, tokens, and how many of these were found in the pool."""
        self._runner = runner
        self._on_computed = on_computed
        self._places = asyncio.Semaphore(MOST_COMPUTED)

    async def compute(self, tenant: str, token_ids: Sequence[int]) -> NodeId:
        """The node in whose store the prompt's blocks are then. Raises what the request fails with."""
        request_id = RequestId(new_id("context-cache"))
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        generation = ev.Generation(request_id, token_ids, sampling, tenant, Terms(idle=True), prompt_only=True)
        async with self._places:
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

    def emit(self, tokens: Sequence[SampledToken]) -> bool:
        return False

    def end(self, reply: ev.Finished | ev.Failed | ev.Cancelled) -> None:
        if not self._ended.done():
            self._ended.set_result(reply)


class Keeper:
    """This gateway's part in looking after all context caches of the cluster."""

    def __init__(self, catalogue: Catalogue, stores: Stores, computer: Computer, now: Callable[[], float] = time.time) -> None:
        """`now` is Unix time."""
        self._catalogue = catalogue
        self._stores = stores
        self._computer = computer
        self._now = now
        self._looks: dict[asyncio.Task[None], Claim] = {}
        self._doing: dict[tuple[str, CacheId], _Doing] = {}
        """Of the looks that have begun."""
        self._due = asyncio.Event()
        self._stores_at = float("-inf")
        """When the stores were last looked at, on the event loop's clock."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = supervised(self._run, "context-cache-keeper")

    def hurry(self) -> None:
        """Something is due now."""
        self._due.set()

    def computed(self, tenant: str, cache_id: CacheId, node_id: NodeId) -> None:
        """A request has just used all of a cache's prompt at that node: nobody needs to wait for idle capacity to compute it."""
        store, doing = self._stores.store(node_id), self._doing.get((tenant, cache_id))
        if store is not None and doing is not None:
            doing.tell(core.Computed(store))

    async def close(self) -> None:
        """What this gateway looked at is due at once, for another."""
        claims = list(self._looks.values())
        tasks = [*self._looks, *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            for claim in claims:
                await self._catalogue.put_back(claim, self._now())
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
        if (woken := await self._catalogue.stores_changed(self._stores.word, now)) > 0:
            logger.info("the stores are others than before: %d context caches are looked at", woken)
        free = MOST_LOOKS - len(self._looks)
        for claim in await self._catalogue.claim(now, now + CLAIM_S, free) if free else ():
            if any((claim.tenant, claim.cache_id) == (other.tenant, other.cache_id) for other in self._looks.values()):
                # Woken while it is being looked at here: once more when that is over.
                await self._catalogue.put_back(claim, now + LOOK_FOR_DUE_EVERY_S)
                continue
            task = asyncio.create_task(self._look(claim), name=f"look-{claim.cache_id}")
            self._looks[task] = claim
            task.add_done_callback(self._looked)

    def _looked(self, task: asyncio.Task[None]) -> None:
        if len(self._looks) == MOST_LOOKS:
            self._due.set()  # there is a place again
        del self._looks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            # The claim runs out, and somebody looks again.
            level = logging.INFO if isinstance(error, SpringtideError) else logging.ERROR
            logger.log(level, "a look at a context cache has failed: %s", error, exc_info=None if level == logging.INFO else error)

    async def _look(self, claim: Claim) -> None:
        cache = await self._catalogue.get(claim.tenant, claim.cache_id)
        if cache is None:
            await self._catalogue.put_back(claim, None)
            return
        keys = await self._catalogue.keys(claim.tenant, claim.cache_id)
        doing = _Doing(self._catalogue, self._stores, self._computer, cache, keys, self._now)
        self._doing[claim.tenant, claim.cache_id] = doing
        renewing = asyncio.create_task(self._renew(claim))
        try:
            until = await doing.run()
        finally:
            del self._doing[claim.tenant, claim.cache_id]
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
        await self._catalogue.put_back(self._looks.get(_this_task(), claim), until)

    async def _renew(self, claim: Claim) -> None:
        """Keeps the claim until it is somebody else's."""
        task = next(task for task, claimed in self._looks.items() if claimed == claim)
        while True:
            await asyncio.sleep(CLAIM_S / 3)
            try:
                renewed = await self._catalogue.renew(claim, self._now() + CLAIM_S)
            except Unavailable:
                continue
            if renewed is None:
                return
            claim = self._looks[task] = renewed


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
        now: Callable[[], float],
    ) -> None:
        self._catalogue = catalogue
        self._stores = stores
        self._computer = computer
        self._cache = cache
        self._keys = keys
        self._now = now
        self._events: asyncio.Queue[core.Event | Exception] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pinning: dict[NodeId, asyncio.Task[None]] = {}

    def tell(self, event: core.Event) -> None:
        self._events.put_nowait(event)

    async def run(self) -> float | None:
        """The time at which the cache is due again; None: never."""
        look = core.Look(self._cache)
        self._events.put_nowait(core.Begun(self._stores.seen))
        try:
            while True:
                event = await self._events.get()
                if isinstance(event, Exception):
                    raise event
                for action in look.handle(event, self._now()):
                    if isinstance(action, core.Rest):
                        return action.until
                    await self._do(action)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _do(self, action: core.Action) -> None:
        match action:
            case core.Pin(node_id, strength, ttl_s):
                self._pinning[node_id] = self._spawn(self._stores.pin(node_id, self._cache, self._keys, strength, ttl_s))
            case core.Unpin(node_id):
                if (pinning := self._pinning.get(node_id)) is not None:
                    await asyncio.wait([pinning])
                await self._stores.unpin(node_id, self._cache.pin_id)
            case core.Copy(node_id, sources):
                self._spawn(self._stores.copy(node_id, self._keys, sources))
            case core.Compute():
                self._spawn(self._compute())
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

    async def _compute(self) -> core.Computed | core.NotComputed:
        cache = self._cache
        try:
            raw = await self._catalogue.content(cache.tenant, cache.cache_id)
            if raw is None:
                return core.NotComputed("its content is not there any more", for_good=True)
            content = await asyncio.to_thread(content_from, raw)
            node_id = await self._computer.compute(cache.tenant, content.token_ids)
            await self._catalogue.count(cache, self._now(), creation_tokens=len(content.token_ids))
        except InvalidRequest as error:
            return core.NotComputed(error.message, for_good=True)
        except SpringtideError as error:
            # Which node failed, and where it is, is not for whoever looks at the cache.
            logger.info("context cache %s is not computed: %s", cache.cache_id, error.message)
            return core.NotComputed("it could not be computed just now, and is tried again", for_good=False)
        store = self._stores.store(node_id)
        if store is None:
            return core.NotComputed("its store was lost, and it is computed again", for_good=False)
        return core.Computed(store)
