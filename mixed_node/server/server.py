"""The server of an engine that decodes, and computes prompts: its own, or others' too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import grpc.aio

from decode_node.core.actions import LoadAhead
from decode_node.core.drafting import MOST_DRAFTED, MOST_FORETOLD
from decode_node.core.events import Loaded, StepDone, StepFailed
from decode_node.core.settings import DecodeSettings
from decode_node.server.loads import LoadsAhead
from decode_node.server.service import DECODE_SERVICE, OutputCounters
from engine.sampling.grammars import Grammars
from engine.sampling.sampler import Sampler
from kvstore.link import StoreLink
from mixed_node.core import MixedCore
from mixed_node.core.actions import Action, MixedAction, RunMixed
from mixed_node.core.events import Event, MixedDone, MixedEvent
from mixed_node.server.steps import MixedRunner
from node_runtime.events import Ordered, SendUpdate, Start
from node_runtime.held_starts import HeldStarts, when_compiled
from node_runtime.loading import Parts
from node_runtime.model_thread import Watchdog, longest_s, stalled_after_s
from node_runtime.server import EngineServer
from node_runtime.servicer import EngineServicer
from prefill_node.core.actions import GiveWay, RunPass
from prefill_node.core.events import PassDone, PassEnded, PassFailed
from prefill_node.server.passes import Pushes, conclude, longest_pass_s
from prefill_node.server.service import PREFILL_SERVICE, PromptCounters, settings_of
from prefill_node.stage.compute import Hooks, PassPart
from springtide.clock import Tick
from springtide.cost import DecodeCost, PrefillCost
from springtide.ids import AttemptId, InstanceId
from springtide.process import end_process
from springtide.protocol import storage
from springtide.protocol.instances import LoadReport, Role
from springtide.protocol.outputs import AttemptFailed, AttemptSign, AttemptSigns, DecodeUpdate, HandedOver, PrefillUpdate
from springtide.protocol.starts import DecodeStart, PrefillStart

logger = logging.getLogger(__name__)

INGEST_LEASES = 10
"""A prompt may take so many leases' time from its reservation to its last block: the prefill side's queue, its compute and the transfer."""

SLOT_WAIT_S = 10.0
"""Whoever waits longer for room is scheduled again, with its age: another node may have room by now."""


class MixedServer(EngineServer[DecodeStart, DecodeUpdate, MixedEvent, MixedAction]):
    """The server: steps and passes run on the model's thread, loads ahead of steps beside it. Its first service is that of a decode node;
    that of a prefill node is there for who orders prompts that are decoded elsewhere."""

    def __init__(self, parts: Parts, costs: tuple[PrefillCost, DecodeCost], grammars: Grammars, names: Mapping[Role, InstanceId]) -> None:
        """`names`: by which the Conductor knows it, in the roles that it offers."""
        arguments, (prefill_cost, decode_cost) = parts.arguments, costs
        config = arguments.config
        settings = DecodeSettings(
            cost=decode_cost,
            block_tokens=parts.runner.kv_spec.block_tokens,
            max_batch=config.decode_node.max_batch,
            eos_token_ids=arguments.model_info.eos_token_ids,
            ingest_lease_s=INGEST_LEASES * config.kv.lease_s,
            slot_wait_s=SLOT_WAIT_S,
            overlap=config.decode_node.overlap,
            loads_ahead=parts.runner.loads_ahead,
            answer_s=config.silence_s,
            idle_slowdown=config.slo.idle_slowdown,
            most_drafted=MOST_DRAFTED if config.decode_node.speculation == "auto" and parts.runner.takes_drafts else 0,
            most_foretold=MOST_FORETOLD if parts.runner.takes_drafts else 0,
            inline_tokens=None if Role.PREFILL in names else config.decode_node.inline_tokens,
        )
        prompts = replace(settings_of(arguments, prefill_cost), breaks_off=config.decode_node.tensor_parallel == 1)
        self.core = MixedCore(prompts, settings)
        super().__init__(DECODE_SERVICE, parts, self.core, grammars, keeps_role="it has both" if Role.PREFILL in names else "")
        self._names = names
        self._prompts: EngineServicer[PrefillStart, PrefillUpdate] = EngineServicer(
            PREFILL_SERVICE,
            self.check,
            self._prompt_commanded,
            self._prompts_report,
            parts.clock,
            keeps_role="it has both",
            first_session=2,
        )
        self._held_prompts: HeldStarts[PrefillStart] = HeldStarts(grammars, lambda start: True, self.tell, self._refuse_prompt)
        self._outputs, self._prompt_counters = OutputCounters(self.vllm), PromptCounters(self.vllm, parts.clock)
        self._mixed = MixedRunner(parts.runner, Sampler(arguments.model_info, grammars).sample)
        self._watchdog = Watchdog(end_process)
        self._loads = LoadsAhead(parts.runner, parts.thread)
        self._give_way: set[int] = set()
        """Passes in flight that are to be broken off. The model's thread looks."""

    def register(self, server: grpc.aio.Server) -> None:
        super().register(server)
        self._prompts.register(server)

    def leave(self) -> None:
        super().leave()
        self._prompts.leave()

    def note_change(self) -> None:
        super().note_change()
        self._prompts.note_change()

    async def close(self) -> None:
        self._watchdog.close()
        self._loads.close()
        await super().close()

    # ---- what gateways order ----

    def _prompt_commanded(self, event: Ordered[PrefillStart]) -> None:
        if not self._held_prompts.keeps(event):
            self.tell(event)

    def _refuse_prompt(self, session: int, failed: AttemptFailed) -> None:
        self._prompt_counters.update(failed)
        self._prompts.send(session, failed)

    def on_notice(self, notice: storage.Notice) -> None:
        if isinstance(notice, storage.Ingested) and (grammar := self.core.decode.grammar_of(notice.attempt_id)):
            compiled = self._grammars.prepare(grammar)
            if not compiled.done():
                # Until then it is in no step: the model's thread, and with it all others, would wait for that.
                when_compiled(compiled, lambda: self.tell(notice))
                return
        super().on_notice(notice)

    def samples_first(self, start: DecodeStart) -> bool:
        return start.inlined

    # ---- what the core decides ----

    def act(self, action: Action) -> None:
        if isinstance(action, SendUpdate) and not isinstance(action.update, DecodeUpdate):
            self._prompt_counters.update(action.update)
            self._prompts.send(action.session, action.update)
            return
        super().act(action)

    def perform(self, action: MixedAction) -> None:
        match action:
            case RunMixed():
                self._launch(action)
            case LoadAhead():
                self._load_ahead(action)
            case GiveWay(pass_id):
                self._give_way.add(pass_id)

    def _launch(self, mixed: RunMixed) -> None:
        step, run = mixed.step, mixed.run
        step_ms = pass_s = 0.0
        if step is not None:
            self._outputs.launched(step)
            step_ms = self.core.decode.cost.predict_ms(len(step.rows), step.context_tokens)
            for row in step.rows:
                self.note_slots(row.attempt_id, row.slots)
        if run is not None:
            self._prompt_counters.launched(run)
            self._outputs.computed(
                sum(len(row.chunk.token_ids) for row in run.rows if self.core.decode.session_of(row.attempt_id) is not None)
            )
            pass_s = longest_pass_s(run, self._arguments.config.kv.lease_s, self._arguments.model_info.layers)
            for chunk in run.rows:
                self.note_slots(chunk.attempt_id, chunk.chunk.slots)
        part = None if run is None else self._part(run, self.link)
        self.thread.run(self._run, mixed, part, step_ms, pass_s).add_done_callback(partial(self._ended, mixed))

    def _load_ahead(self, load: LoadAhead) -> None:
        link = self.link

        def still_there() -> bool:
            return link is not None and self.link is link

        self.note_slots(load.attempt_id, load.slots)
        self._loads.start(load.attempt_id, load.slots, still_there, lambda: self.tell(Loaded(load.attempt_id)))

    def _run(self, mixed: RunMixed, part: tuple[PassPart, Hooks] | None, step_ms: float, pass_s: float) -> MixedDone:
        """On the model's thread. `step_ms`: predicted, of the step; `pass_s`: the longest that the pass may take."""
        run, silence_s = mixed.run, self._arguments.config.silence_s
        predicted_ms = step_ms + (0.0 if run is None else run.predicted_ms)
        what = f"step {mixed.step.step_id}" if mixed.step is not None else f"pass {run.pass_id if run is not None else ''}"
        beside = self.neighbours.do_idle_work
        with self._watchdog.during(what, longest_s(step_ms) + pass_s, stalled_after_s(predicted_ms, silence_s)):
            step, ran, elapsed_ms = self._mixed.run(mixed, part)
        unchanged = beside == self.neighbours.do_idle_work
        if isinstance(step, StepDone) and unchanged:
            step = replace(step, beside_idle=beside)
        ended: PassEnded | None = None
        if run is not None and ran is not None:
            ended = conclude(run, [ran], elapsed_ms)
            if isinstance(ended, PassDone) and unchanged:
                ended = replace(ended, beside_idle=beside)
        return MixedDone(step, ended)

    def _part(self, run: RunPass, link: StoreLink | None) -> tuple[PassPart, Hooks]:
        pushes = Pushes(run.pushes)
        part = PassPart.of_run(run, pushes.layer_ends, last=True)

        def computed(layer_end: int) -> None:
            if link is not None:
                pushes.send(link, layer_end)

        def wait_layer(attempt_id: AttemptId, layer: int, timeout_s: float) -> int | None:
            raise AssertionError(f"no pass waits here for a prefix, and the one of {attempt_id} does")

        gives_way = partial(self._give_way.__contains__, run.pass_id)
        return part, Hooks(part, 0, wait_layer, self._arguments.config.kv.lease_s, computed, gives_way)

    def _ended(self, mixed: RunMixed, ended: asyncio.Future[MixedDone]) -> None:
        """Whatever has become of it, the core hears of its end: it launches no other before, and nobody else would."""
        if ended.cancelled():
            return
        step, run = mixed.step, mixed.run
        if (error := ended.exception()) is None:
            event = ended.result()
        else:
            logger.error("a step failed", exc_info=error)
            message = f"the step failed: {error!r}"
            event = MixedDone(
                None if step is None else StepFailed(step.step_id, message), None if run is None else PassFailed(run.pass_id, message)
            )
        if run is not None:
            self._give_way.discard(run.pass_id)
        if isinstance(event.step, StepDone):
            self._outputs.stepped(event.step)
        if run is not None and isinstance(event.ran, PassDone):
            self._prompt_counters.passed(run, event.ran.elapsed_ms)
        self.tell(event)

    # ---- how it is doing ----

    def held_signs(self) -> Iterator[tuple[int, AttemptSign]]:
        yield from super().held_signs()
        yield from self._held_prompts.signs()

    def send_signs(self, session: int, signs: AttemptSigns) -> None:
        if self._prompts.serves(session):
            self._prompts.send(session, signs)
        else:
            super().send_signs(session, signs)

    @property
    def stalled_work(self) -> str:
        return self._watchdog.stalled

    @property
    def num_held(self) -> int:
        return super().num_held + len(self._held_prompts)

    def _prompts_report(self) -> LoadReport:
        """What watchers of the prefill side are told."""
        doing = self.core.prefill_load(*self.slots())
        doing = replace(
            doing,
            waiting=doing.waiting + len(self._held_prompts),
            attempt_ids=doing.attempt_ids | self._held_prompts.attempt_ids,
            ssd_read_us_per_block=self.store_load.ssd_read_us_per_block,
        )
        name = self._names.get(Role.PREFILL, InstanceId(self._arguments.instance_id))
        return LoadReport(name, self.incarnation, doing, self.stalled)

    def handled(self, event: Event) -> None:
        if isinstance(event, Start):
            role = Role.PREFILL if isinstance(event.start, PrefillStart) else Role.DECODE
            self.vllm.started(event.start.request, role)
            self._prompt_counters.started(event.start.request)
        elif isinstance(event, HandedOver):
            self._prompt_counters.handed_over(event)
        elif isinstance(event, Tick):
            load, prompts = self.load(), self.core.prefill_load(*self.slots())
            both = load.attempt_ids | prompts.attempt_ids
            others = len(prompts.attempt_ids - load.attempt_ids)
            self.vllm.doing(replace(load, waiting=load.waiting + others, attempt_ids=both), self.num_held)
            self._held_prompts.keep_compiled(both)
            self._outputs.doing(load, self.core.decode.slowdown)
            self._prompt_counters.doing(prompts, self.core.prefill.slowdown)

    def count_update(self, update: DecodeUpdate) -> None:
        self._outputs.update(update)
