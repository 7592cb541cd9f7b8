"""Context caches as clients and their requests see them: created, found, extended, deleted; put in the place of messages; counted. What an
API calls all this is its façade's business."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway import events as ev
from gateway import metrics
from gateway.accounts.allowance import Caller
from gateway.api_request import NOTHING, ApiRequest, CacheUse, Conversation, ToolChoice
from gateway.bodies import UNKNOWN_BYTES, SideThread
from gateway.caching.catalogue import MARK_PREFIX, MAX_TTL_S, Budget, Catalogue, Tag
from gateway.caching.context import (
    CacheId,
    Content,
    ContextCache,
    Kept,
    Meter,
    MissReason,
    Status,
    Strength,
    Use,
    canonical,
    content_bytes,
    content_from,
    message_json,
)
from gateway.caching.core import Store
from gateway.caching.keeper import Keeper
from gateway.caching.prefix import stable_prefix
from gateway.caching.stores import Stores
from gateway.prepare import PreparedRequest, in_the_clients_words
from gateway.records import Order
from gateway.state import Hashing
from springtide.errors import InvalidRequest, Overloaded, SpringtideError
from springtide.ids import BlockKey, NodeId, RequestId
from springtide.protocol.sampling import SamplingParams
from springtide.supervision import end

logger = logging.getLogger(__name__)

DEFAULT_TTL_S = 3600.0
MAX_REPLICAS = 16
MAX_TAGS_LISTED = MAX_LISTED = 100
MAX_NAME, MAX_DESCRIPTION = 256, 512
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
_CONTENTS_KEPT = 32
"""Of the last used, each of some bytes a token."""


class NoSuchCache(InvalidRequest):
    """The tenant has no such context cache, or it is of a model that the caller may not use."""

    http_status = 404


@dataclass(frozen=True, slots=True)
class Draft:
    """A context cache to be."""

    conversation: Conversation
    ttl_s: float = DEFAULT_TTL_S
    strength: Strength = Strength.HARD
    replicas: int = 1
    name: str = ""
    description: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


class Desk:
    """The context caches, for whoever asks. Everything is of one tenant, and of models that the caller may use: what is another's looks
    like what there is not."""

    def __init__(
        self,
        catalogue: Catalogue,
        keeper: Keeper,
        stores: Stores,
        side_thread: SideThread,
        render: Callable[[Conversation], Sequence[int]],
        hashing: Hashing,
        budget: Callable[[str, str], Budget],
        now: Callable[[], float] = time.time,
    ) -> None:
        """`render` makes a conversation's tokens, beside the event loop. `budget` is that of a tenant and of an API key
        of its, by their ids."""
        self._catalogue = catalogue
        self._keeper = keeper
        self._stores = stores
        self._side_thread = side_thread
        self._render = render
        self._hashing = hashing
        self._budget = budget
        self._now = now
        self._contents: dict[tuple[str, str], Content] = {}
        """Of the last used, the last at the end."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def now(self) -> float:
        return self._now()

    async def close(self) -> None:
        await end(*self._tasks)

    # ---- what clients do with them ----

    async def create(self, caller: Caller, model: str, draft: Draft) -> ContextCache:
        """Pending; it is computed from now on. Raises InvalidRequest, ModelNotFound, and Overloaded when the tenant's budget is used up."""
        caller.check_model(model)
        _check_draft(draft)
        tenant, now = caller.tenant, self._now()
        size = _size(draft.conversation)
        content, tokens, keys, written = await self._side_thread.run(size, self._written, tenant, draft.conversation)
        cache = ContextCache(
            cache_id=CacheId(f"cache-{secrets.token_hex(12)}"),
            tenant=tenant,
            model=model,
            tokens=tokens,
            blocks=len(keys),
            created_at=now,
            expires_at=now + draft.ttl_s,
            strength=draft.strength,
            replicas=draft.replicas,
            name=draft.name,
            description=draft.description,
            metadata=draft.metadata,
            active_since=now,
            key_id=caller.key_id,
        )
        await self._spend(cache, now)
        await self._catalogue.add(cache, keys, written, now)
        self._remember(tenant, cache.cache_id, content)
        self._keeper.hurry()
        return cache

    def _written(self, tenant: str, conversation: Conversation) -> tuple[Content, int, Sequence[BlockKey], bytes]:
        token_ids, stable = stable_prefix(self._render, conversation)
        generation = ev.Generation(RequestId("context-cache"), token_ids, SamplingParams(max_tokens=1), tenant)
        keys = self._hashing.keys(generation, token_ids[:stable])
        if not keys:
            raise InvalidRequest(
                f"messages and tools have {stable} tokens that every conversation which begins with them shares; "
                f"at least {self._hashing.block_tokens} are needed to be kept (kv.block_tokens)",
                param="messages",
                code="context_too_short",
            )
        content = Content(conversation, tuple(token_ids[:stable]))
        return content, len(token_ids), keys, content_bytes(content)

    async def get(self, caller: Caller, cache_id: str) -> ContextCache:
        """Raises NoSuchCache."""
        cache = await self._known(caller.tenant, cache_id)
        if not caller.may_use(cache.model):
            raise _no_such(cache_id)
        return cache

    async def with_content(self, caller: Caller, cache_id: str) -> tuple[ContextCache, Content]:
        """Raises NoSuchCache."""
        cache = await self.get(caller, cache_id)
        return cache, await self._content(caller.tenant, cache_id)

    async def meter(self, cache: ContextCache) -> Meter:
        return await self._catalogue.meter(cache.tenant, cache.cache_id)

    async def page(
        self,
        caller: Caller,
        *,
        order: Order = "desc",
        after: str = "",
        before: str = "",
        limit: int = 20,
        metadata: Mapping[str, str] = NOTHING,
    ) -> tuple[list[ContextCache], bool]:
        """Up to so many of them, of those that have all of the metadata, and whether there are more."""

        def wanted(cache: ContextCache) -> bool:
            return caller.may_use(cache.model) and metadata.items() <= cache.metadata.items()

        return await self._catalogue.page(caller.tenant, wanted, order=order, after=after, before=before, limit=min(limit, MAX_LISTED))

    async def update(
        self, caller: Caller, cache_id: str, *, ttl_s: float | None = None, metadata: Mapping[str, str] | None = None
    ) -> ContextCache:
        """Lets it end in `ttl_s` from now, and gives it other metadata. One that has ended is pending again. Raises NoSuchCache,
        InvalidRequest, and Overloaded when the tenant's budget does not suffice for it any more."""
        return await self._update(await self.get(caller, cache_id), ttl_s, metadata)

    async def _update(self, cache: ContextCache, ttl_s: float | None, metadata: Mapping[str, str] | None) -> ContextCache:
        now = self._now()
        if ttl_s is not None:
            _check_ttl(ttl_s)
        if metadata is not None:
            _check_metadata(metadata)
        if ttl_s is not None:
            await self._spend(replace(cache, expires_at=now + ttl_s), now)

        def change(cache: ContextCache) -> ContextCache:
            if metadata is not None:
                cache = replace(cache, metadata=metadata)
            return cache if ttl_s is None else cache.extended(now + ttl_s, now)

        changed = await self._catalogue.change(cache.tenant, cache.cache_id, change, now)
        if changed is None:
            raise _no_such(cache.cache_id)
        self._keeper.hurry()
        return changed

    async def delete(self, caller: Caller, cache_id: str) -> None:
        """Its blocks are kept no longer than others. Raises NoSuchCache."""
        await self.get(caller, cache_id)
        cache = await self._catalogue.remove(caller.tenant, cache_id)
        self._contents.pop((caller.tenant, cache_id), None)
        if cache is not None:
            await asyncio.gather(*(self._stores.unpin(node_id, cache.pin_id) for node_id in cache.kept.held))

    async def tag(self, caller: Caller, tag: str, cache_id: str) -> Tag:
        """Names a cache, in place of what the name was for. Raises NoSuchCache, and RecordsFull when the tenant has as many names as
        there may be."""
        await self.get(caller, cache_id)
        named = Tag(tag, CacheId(cache_id), self._now())
        await self._catalogue.tag(caller.tenant, named)
        return named

    async def tagged(self, tenant: str, tag: str) -> Tag:
        """Raises NoSuchCache."""
        found = await self._catalogue.tagged(tenant, tag)
        if found is None:
            raise NoSuchCache(f"there is no tag {tag[:128]!r}", param="tag", code="tag_not_found")
        return found

    async def tags(
        self, tenant: str, *, order: Order = "desc", after: str = "", before: str = "", limit: int = 20
    ) -> tuple[list[Tag], bool]:
        return await self._catalogue.tags(tenant, order=order, after=after, before=before, limit=min(limit, MAX_TAGS_LISTED))

    async def untag(self, tenant: str, tag: str) -> bool:
        """Whether there was one."""
        return await self._catalogue.untag(tenant, tag)

    # ---- what requests do with them ----

    async def applied(self, tenant: str, request: ApiRequest) -> tuple[ApiRequest, Use | None]:
        """What is left to run of a request that names a context cache, and which it was, if there was any. Raises NoSuchCache and
        InvalidRequest where it cannot be run without."""
        wanted = request.cache
        plain = replace(request, cache=CacheUse(salt=wanted.salt, keep_all_s=wanted.keep_all_s))
        if not isinstance(request.prompt, Conversation):
            raise InvalidRequest("a context cache begins a conversation, and this is a text", param="cache_id")
        try:
            cache_id = wanted.cache_id or (await self.tagged(tenant, wanted.tag)).cache_id
            if wanted.in_prompt:
                use = await self.compared(tenant, cache_id, request.prompt)
            else:
                begun, use = await self.begin_with(tenant, cache_id, request.prompt)
                plain = replace(plain, prompt=begun)
        except NoSuchCache as error:
            if wanted.in_prompt:
                return plain, None
            raise in_the_clients_words(error, request.names) from None
        if wanted.extend_s is not None and use.matches:
            use = replace(use, cache=await self._extended(use.cache, wanted.extend_s))
        return plain, use

    async def _known(self, tenant: str, cache_id: str) -> ContextCache:
        cache = None if cache_id.startswith(MARK_PREFIX) else await self._catalogue.get(tenant, cache_id)
        if cache is None:
            raise _no_such(cache_id)
        return cache

    async def _content(self, tenant: str, cache_id: str) -> Content:
        known = self._contents.pop((tenant, cache_id), None)
        if known is None:
            raw = await self._catalogue.content(tenant, cache_id)
            if raw is None:
                raise _no_such(cache_id)
            known = await self._side_thread.run(len(raw), content_from, raw)
        self._remember(tenant, cache_id, known)
        return known

    async def _extended(self, cache: ContextCache, ttl_s: float) -> ContextCache:
        try:
            return await self._update(cache, ttl_s, None)
        except Overloaded as error:
            # The request itself wants nothing that is not there.
            logger.info("%s is not extended: %s", cache.cache_id, error.message)
            return cache

    async def begin_with(self, tenant: str, cache_id: str, conversation: Conversation) -> tuple[Conversation, Use]:
        """The conversation with the cache's messages and tools before its own. Raises NoSuchCache, and InvalidRequest when it has tools of
        its own."""
        if conversation.tools:
            raise InvalidRequest("tools must not be given where a context cache is: it has its own", param="tools")
        cache, content = await asyncio.gather(self._known(tenant, cache_id), self._content(tenant, cache_id))
        choice = conversation.tool_choice
        begun = replace(
            conversation,
            messages=content.conversation.messages + conversation.messages,
            tools=content.conversation.tools,
            tool_choice=content.conversation.tool_choice if choice == ToolChoice() else choice,
            template_options={**content.conversation.template_options, **conversation.template_options},
        )
        return begun, Use(cache, cache.status(self._now()))

    async def compared(self, tenant: str, cache_id: str, conversation: Conversation) -> Use:
        """Whether the conversation begins with the cache's messages and has its tools. Raises NoSuchCache."""
        cache, content = await asyncio.gather(self._known(tenant, cache_id), self._content(tenant, cache_id))
        kept = content.conversation
        matches = await self._side_thread.run(_size(kept), _begins_with, conversation, kept)
        return Use(cache, cache.status(self._now()), matches)

    def used(self, use: Use, cached_tokens: int) -> MissReason | None:
        """Counts a request that has been answered, in the background. Returns why it missed; None: it did not."""
        reason = self._why_missed(use, cached_tokens)
        cache, now = use.cache, self._now()
        self._spawn(self._catalogue.count(cache, calls=1, saved_tokens=min(cached_tokens, cache.tokens) if use.matches else 0))
        if reason == MissReason.NOT_HELD:
            # Whoever looks finds out where it has gone.
            self._spawn(self._catalogue.wake(cache.tenant, cache.cache_id, now))
            self._keeper.hurry()
        return reason

    def _why_missed(self, use: Use, cached_tokens: int) -> MissReason | None:
        if not use.matches:
            return MissReason.MESSAGES_CHANGED
        if cached_tokens >= use.cache.blocks * self._hashing.block_tokens:
            return None
        reasons = {Status.PENDING: MissReason.PENDING, Status.INACTIVE: MissReason.INACTIVE, Status.ERROR: MissReason.ERROR}
        return reasons.get(use.status, MissReason.NOT_HELD)

    # ---- marks ----

    def answered(self, request: PreparedRequest, prompt: int, reply: ev.Finished) -> str:
        """Counts the use of a context cache by a request whose prompt of this number has been answered, and keeps what it has marked.
        Returns why the cache was missed; empty: it was not."""
        missed, node_id = None, None if reply.prompt_at is None else reply.prompt_at.node_id
        if request.use is not None and prompt == 0:
            missed = self.used(request.use, reply.cached_tokens)
            if request.use.matches and node_id is not None:
                cache_id = request.use.cache.cache_id
                self._spawn(self._catalogue.count_use(request.tenant, cache_id, node_id))
                if missed is not None:
                    self.found(request.tenant, cache_id, node_id)
        if node_id is not None and request.marks and request.marks[prompt]:
            self._spawn(self._keep_marked(request, prompt, reply.cached_tokens, node_id))
        return "" if missed is None else missed.value

    def found(self, tenant: str, cache_id: CacheId, node_id: NodeId) -> None:
        """A request has just used all of a cache's prompt at that node: nobody needs to wait for idle capacity to compute it."""
        if (store := self._stores.store(node_id)) is not None:
            self._spawn(self._note(tenant, cache_id, store))

    async def _note(self, tenant: str, cache_id: CacheId, store: Store) -> None:
        await self._catalogue.found(tenant, cache_id, store.node_id, store.incarnation, self._now())
        self._keeper.hurry()

    async def _keep_marked(self, request: PreparedRequest, prompt: int, cached_tokens: int, prompt_at: NodeId) -> None:
        generation, marks = request.generation(prompt * request.n, accepted=True), request.marks[prompt]
        block_tokens = self._hashing.block_tokens
        keys = self._hashing.keys(generation, generation.prompt_ids[: marks[-1].tokens])
        if cached_tokens < marks[-1].findable_tokens:
            # Asked before its own marks are written down.
            reason = await self._why_mark_missed(request.tenant, keys, cached_tokens)
            metrics.MARK_MISSES.labels(reason.value).inc()
            what = "of %d marked tokens, %d were found: %s"
            logger.info(what, marks[-1].tokens, cached_tokens, reason.value, extra={"request_id": generation.request_id})
        for mark in marks:
            self.mark(request.tenant, keys[: mark.tokens // block_tokens], mark.ttl_s, prompt_at, request.usage_row.key_id)

    async def _why_mark_missed(self, tenant: str, keys: Sequence[BlockKey], cached_tokens: int) -> MissReason:
        """By what is remembered of these prefixes that are longer than what was found: an earlier request may have marked a shorter one."""
        now = self._now()
        unfound = [_mark_id(key) for key in keys[cached_tokens // self._hashing.block_tokens :]]
        records = await self._catalogue.marked(tenant, unfound)
        if not records:
            return MissReason.NEW
        # By the time alone: the status of one that was lost is inactive, too.
        return MissReason.INACTIVE if all(record.expired(now) for record in records) else MissReason.NOT_HELD

    def mark(self, tenant: str, keys: Sequence[BlockKey], ttl_s: float, prompt_at: NodeId, key_id: str = "") -> None:
        """Keeps the blocks, which a request has just used at that node, for `ttl_s` from now; in the background, and only if the budgets
        of the tenant and of the API key suffice. Marking the same again lets them stay longer, and count for the key that did."""
        if keys and ttl_s > 0:
            self._spawn(self._mark(tenant, keys, min(ttl_s, MAX_TTL_S), prompt_at, key_id))

    async def _mark(self, tenant: str, keys: Sequence[BlockKey], ttl_s: float, prompt_at: NodeId, key_id: str) -> None:
        now = self._now()
        store = self._stores.store(prompt_at)
        if store is None:
            return
        # The last key is that of the tenant's whole prefix.
        cache_id = _mark_id(keys[-1])
        kept = Kept(held={prompt_at: store.incarnation})
        cache = ContextCache(
            cache_id=cache_id,
            tenant=tenant,
            model="",
            tokens=len(keys) * self._hashing.block_tokens,
            blocks=len(keys),
            created_at=now,
            expires_at=now + ttl_s,
            key_id=key_id,
            marked=True,
            active_since=now,
            kept=kept,
        )
        # What this one keeps for as long, it keeps in the place of those before: a conversation's turns are not counted each by itself.
        covered = await self._catalogue.ending_by(tenant, [_mark_id(key) for key in keys[:-1]], cache.expires_at)
        if await self._catalogue.spend(cache, self._budget(tenant, key_id), now, instead_of=covered) is not None:
            logger.info("the budget of %r does not suffice to keep %d marked tokens", tenant, cache.tokens)
            return

        def renew(cache: ContextCache) -> ContextCache:
            lasting = replace(cache, expires_at=max(cache.expires_at, now + ttl_s), key_id=key_id)
            return lasting if cache.kept.status in (Status.PENDING, Status.READY) and cache.kept.held else lasting.with_kept(kept)

        if not await self._catalogue.add(cache, keys, b"", now):
            await self._catalogue.change(tenant, cache_id, renew, now)
        self._keeper.hurry()
        for mark_id in covered:
            if (removed := await self._catalogue.remove(tenant, mark_id)) is not None:
                await asyncio.gather(*(self._stores.unpin(node_id, removed.pin_id) for node_id in removed.kept.held))
        await self._catalogue.count_use(tenant, cache_id, prompt_at)

    # ---- helpers ----

    async def _spend(self, cache: ContextCache, now: float) -> None:
        budget = self._budget(cache.tenant, cache.key_id)
        over = await self._catalogue.spend(cache, budget, now)
        if over is None:
            return
        wanted = cache.budgeted_tokens
        bounds = [(budget.tokens, over.taken_tokens, "server.cache_budget_tokens, or what is set for the tenant")]
        if budget.of_key is not None:
            bounds.append((budget.of_key, over.taken_by_key, "what is set for the API key"))
        for most, _, by in bounds:
            if wanted > most:
                raise InvalidRequest(
                    f"{cache.tokens} tokens in {cache.replicas} stores are more than the budget for context caches: {most} ({by})",
                    param="messages",
                    code="cache_budget_exceeded",
                )
        for most, taken, by in bounds:
            if taken + wanted > most:
                raise Overloaded(
                    f"context caches take {taken} of {most} tokens ({by}): "
                    f"no room for {wanted} more; delete one, or wait for the next to end",
                    retry_after_s=max(1.0, over.next_end - now),
                    reason="cache_budget_exceeded",
                )
        raise Overloaded(
            f"{over.count} context caches have not ended, as many as there may be: delete one, or wait for the next to end",
            retry_after_s=max(1.0, over.next_end - now),
            reason="too_many_caches",
        )

    def _remember(self, tenant: str, cache_id: str, content: Content) -> None:
        self._contents[tenant, cache_id] = content
        if len(self._contents) > _CONTENTS_KEPT:
            del self._contents[next(iter(self._contents))]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await work
            except SpringtideError as error:
                logger.info("a context cache cannot be written down: %s", error.message)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _no_such(cache_id: str) -> NoSuchCache:
    return NoSuchCache(f"there is no context cache {cache_id[:100]!r}", param="cache_id", code="cache_not_found")


def _mark_id(key: BlockKey) -> CacheId:
    """Of the mark whose last block it is."""
    return CacheId(f"{MARK_PREFIX}{key.hex()}")


def _begins_with(conversation: Conversation, kept: Conversation) -> bool:
    beginning = conversation.messages[: len(kept.messages)]
    same_messages = [message_json(message) for message in beginning] == [message_json(message) for message in kept.messages]
    return same_messages and canonical(conversation)["tools"] == canonical(kept)["tools"]


def _check_draft(draft: Draft) -> None:
    if not draft.conversation.messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    _check_ttl(draft.ttl_s)
    if not 1 <= draft.replicas <= MAX_REPLICAS:
        raise InvalidRequest(f"replicas must be between 1 and {MAX_REPLICAS}, not {draft.replicas}", param="replicas")
    for name, value, most in (("name", draft.name, MAX_NAME), ("description", draft.description, MAX_DESCRIPTION)):
        if len(value) > most:
            raise InvalidRequest(f"{name} may have at most {most} characters, not {len(value)}", param=name)
    _check_metadata(draft.metadata)


def _check_ttl(ttl_s: float) -> None:
    if not 0 < ttl_s <= MAX_TTL_S:
        raise InvalidRequest(f"ttl must be more than 0 and at most {MAX_TTL_S:.0f} seconds, not {ttl_s:g}", param="ttl")


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(f"metadata may have at most {MAX_METADATA} entries, not {len(metadata)}", param="metadata")
    for name, value in metadata.items():
        if len(name) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            most = f"{MAX_METADATA_KEY} characters in a key and {MAX_METADATA_VALUE} in a value"
            raise InvalidRequest(f"metadata[{name[:MAX_METADATA_KEY]}]: at most {most} are allowed", param="metadata")


def _size(conversation: Conversation) -> int:
    """In characters of its messages, and so that none is small: tools are not counted, and may be large."""
    return UNKNOWN_BYTES + sum(len(message.content) for message in conversation.messages)
