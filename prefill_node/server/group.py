"""A prefill group of one or several stages, as its engine process, which is the first of them, runs it.

A formation is the group's time with one store: it begins when all stages have the store's arena and know the next one's buffers, and it
ends when one of them, or the store, is lost. Then every stage comes to rest, or is killed, before the store gets the slots back; stages
that are gone are started anew, and the next formation begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from engine.runner import ModelRunner
from engine.sampling.grammars import Grammars
from engine.sampling.sampler import Sampler
from kvstore.link import StoreLink
from node_runtime.loading import SCRATCH_TOKENS
from node_runtime.model_thread import ModelThread, Watchdog
from prefill_node.core.actions import RunPass
from prefill_node.server.formation import Formation, FormationArena
from prefill_node.server.passes import Launch, PassTeller
from prefill_node.server.remote_stages import RemoteStage
from prefill_node.server.stages import Stage, StageProcess
from springtide.blocks import blocks_for
from springtide.errors import PeerLost, SpringtideError
from springtide.ids import AttemptId, Incarnation
from springtide.process import ProcessArguments, end_process
from springtide.protocol import storage
from springtide.protocol.stages import FetchNotice

logger = logging.getLogger(__name__)

RETRY_S = 0.5
MOST_TRIES = 5
"""The most tries to form the group, before the process ends with an error, so that whoever runs it hears of what does not mend itself."""


class StageGroup:
    """The group: `start`, `load`, then formation after formation, `close`. From `attach` to `at_rest` it writes into the arena of one
    store."""

    def __init__(self, arguments: ProcessArguments, thread: ModelThread) -> None:
        self._arguments = arguments
        self._thread = thread
        self._watchdog = Watchdog(end_process)
        self.grammars = Grammars(arguments.model_info)
        """Those of the engine's own process."""
        self._sampler = Sampler(arguments.model_info, self.grammars)
        kind = RemoteStage if arguments.config.prefill_node.spread_stages else StageProcess
        self._stages: list[Stage] = [kind(arguments, number) for number in range(1, arguments.config.prefill_node.stages)]
        self._ranges: Sequence[range] = ()
        self._runner: ModelRunner | None = None
        self._formation: Formation | None = None

    async def start(self) -> None:
        """Starts the processes, which take a while until they serve: there may be something else to do meanwhile."""
        self.grammars.load()
        for stage in self._stages:
            await stage.start()

    async def load(self, ranges: Sequence[range], runner: ModelRunner) -> None:
        """Loads the others' layers; `runner` has those of the first range. Raises PeerLost."""
        self._ranges, self._runner = ranges, runner
        await self._have_layers()

    @property
    def scratch_slots(self) -> int:
        """How many slots the memory has that each stage has of its own."""
        return blocks_for(SCRATCH_TOKENS, self._arguments.config.kv.block_tokens)

    async def form(self, arena: FormationArena) -> Formation:
        """A formation in this memory: starts what is not running, and brings all stages together. Raises OSError, SpringtideError when that
        fails time and again."""
        assert self._formation is None
        tries = 1
        while True:
            try:
                self._formation = await self._form_once(arena)
                return self._formation
            except (OSError, SpringtideError) as error:
                if tries == MOST_TRIES:
                    raise
                logger.warning("cannot form the group: %s; trying again", error)
            tries += 1
            await asyncio.sleep(RETRY_S)

    async def _form_once(self, arena: FormationArena) -> Formation:
        """Raises OSError, SpringtideError."""
        assert self._runner is not None, "its layers are loaded first"
        formation = Formation(self._arguments, self._runner, self._sampler, self._thread, self._watchdog, self._ranges, arena)
        try:
            await self._have_layers()
            await formation.begin(self._stages)
        except BaseException:
            await formation.end()
            raise
        return formation

    async def _have_layers(self) -> None:
        """Returns when all further stages run and have their layers. Raises OSError, PeerLost."""
        await asyncio.gather(*(stage.have(layers) for stage, layers in zip(self._stages, self._ranges[1:], strict=True)))

    # ---- as the server sees it ----

    async def attach(self, link: StoreLink, incarnation: Incarnation) -> None:
        """Returns when the further stages are in the link's arena. Raises OSError, SpringtideError when they cannot be."""
        await self.form(FormationArena(link.num_slots, incarnation))

    def launch(self, run: RunPass, link: StoreLink, tell: PassTeller, gives_way: Callable[[], bool]) -> None:
        """Tells of the pass as RunPass says, in the event loop. Pushes go to `link` as soon as their last layer is computed. `gives_way`:
        as of Launch."""
        assert self._formation is not None, "the core launches nothing without a store, and there is none without a formation"
        self._formation.launch(Launch(run, link, tell, gives_way=gives_way))

    def relay(self, notice: storage.Notice) -> None:
        """The store has said this."""
        if self._formation is None or not isinstance(notice, FetchNotice):
            return
        if not isinstance(notice, storage.Acquired) or notice.remote_blocks > 0:
            self._formation.relay(notice)

    def forget(self, attempt_id: AttemptId) -> None:
        """The attempt's slots were given back."""
        if self._formation is not None:
            self._formation.forget(attempt_id)

    def forget_slots(self, slots: Sequence[int]) -> None:
        """No attempt uses them any more (ModelRunner.forget): for runners other than the engine's own."""
        if self._formation is not None:
            self._formation.forget_slots(slots)

    @property
    def stalled(self) -> str:
        """Which pass is in flight for too long; empty: none. It may yet end."""
        return self._formation.stalled if self._formation is not None else ""

    async def broken(self) -> PeerLost:
        """Returns when no pass can be run any more before the next `attach`."""
        assert self._formation is not None
        return await self._formation.broken()

    async def at_rest(self) -> None:
        """Returns when no pass runs any more."""
        if self._formation is not None:
            formation, self._formation = self._formation, None
            await formation.end()

    async def close(self) -> None:
        """Ends the formation, and the processes."""
        await self.at_rest()
        await asyncio.gather(*(stage.close() for stage in self._stages))
        self._watchdog.close()
