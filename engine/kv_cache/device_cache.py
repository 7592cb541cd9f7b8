"""The paged cache in a device's memory, apart from the arena.

The arena stays what others read and write: a slot's slabs are copied from it when a pass needs them and the device has not got them, and
copied to it when they are computed. With hooks around the layers, every slab that a layer has written goes to the arena at once, for what
follows is told of it layer by layer; without, a block goes when it is full, or when its page is needed for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.backends.base import AttentionBackend, AttentionPass, Backend
from engine.batch import Int32Array, LayerHooks, SequenceChunk
from engine.device.base import Device
from engine.device.cuda import CudaStreams, GraphRecorder, Pinned, room_bytes
from engine.device.memory import upload
from engine.device.streams import CopyTimes, DeviceWork, ImmediateStreams, SlabCopy, Streams
from engine.kv_cache.cache import PagedCache
from engine.kv_cache.page_table import PagePlacement, PageTable
from engine.kv_cache.paged_pass import PagedPass, Slabs
from engine.model.base import Model
from engine.model.cuda_graphs import StepGraphs, as_it_is
from engine.shard import Ranks
from springtide.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _LoadAhead:
    """On its way into `pages`, whosever these are by now."""

    pages: Int32Array
    copy: SlabCopy


class DeviceCache(PagedCache):
    keeps_pages = True

    def __init__(self, backend: Backend, slabs: torch.Tensor, heads: int, windows: Sequence[int | None], ranks: Ranks) -> None:
        """`slabs` is the arena, on the CPU, as `engine.runner.arena_tensor` has it, or some layers and heads of it; of the pages that its
        slots could have, as many as `backend.device` has room for are taken. Raises ConfigError when that is none."""
        device = backend.device
        assert device is not None, "a model without a device computes in the arena"
        # Ranks are asked for the same, so that what one has no room for must be refused by all.
        num_pages = ranks.least(_num_pages(device, slabs, backend.workspace_bytes(slabs, heads)))
        self.most_blocks = num_pages
        self.page_table = PageTable(len(slabs), num_pages, slabs.shape[3])
        layers, per_page = slabs.shape[1], slabs.shape[2:]
        # One page more than there are slots for: what fills up a batch is written there, and read by nobody.
        self._pages = torch.empty(layers, num_pages + 1, *per_page, dtype=slabs.dtype, device=device.torch_device)
        self._pages[:, num_pages].zero_()
        self._attention: AttentionBackend = backend.attention(self._pages.transpose(0, 1), heads, windows)
        self._streams: Streams = CudaStreams(device.torch_device) if device.is_cuda else ImmediateStreams()
        self._slabs = Slabs(slabs, self._pages, self._streams)
        self._in_step = ranks.shard.size > 1
        self.steps: StepGraphs | None = None
        """Where decode steps are recorded."""
        if device.step_graphs and not self._in_step:
            record = GraphRecorder() if device.is_cuda else as_it_is
            self.steps = StepGraphs(self._attention, num_pages, device.torch_device, record, device.step_graphs)
        self._has_run = False
        """Whether the last pass was begun: one that is refused has no copies."""
        self._loading: list[_LoadAhead] = []
        """In their order. A pass that uses any of their pages comes after them."""
        storage = slabs.untyped_storage()
        self._pinned = Pinned(storage.data_ptr(), storage.nbytes(), device.torch_device) if device.is_cuda else None

    def warm_up(self, model: Model) -> None:
        if self.steps is not None:
            self.steps.record_all(model)

    def plan(self, batch: Sequence[SequenceChunk]) -> AttentionPass:
        placement = self._place(batch)
        try:
            inner = self._attention.plan(_on_pages(batch, placement))
        except BaseException:
            self.page_table.undo(placement)
            raise
        return PagedPass(inner, placement, self._slabs, self._in_step)

    def run(self, model: Model, hidden: torch.Tensor, planned: AttentionPass, hooks: LayerHooks | None) -> torch.Tensor:
        assert isinstance(planned, PagedPass), "planned by another cache"
        try:
            self._begin(planned.placement)
            hidden = model.run_layers(hidden, planned, planned.begin(hooks))
            self._streams.end()
            planned.finish()
        except BaseException:
            self.page_table.undo(planned.placement)
            planned.settle()
            raise
        self.page_table.done(planned.placement, planned.stored)
        return hidden

    def step(self, model: Model, batch: Sequence[SequenceChunk]) -> torch.Tensor | None:
        steps, slabs = self.steps, self._slabs
        if steps is None or not steps.fits(model, batch):
            return None
        placement = self._place(batch)
        logits: torch.Tensor | None = None
        copies: list[SlabCopy | None] = []
        try:
            self._begin(placement)
            copies += [slabs.load(layer, placement.loaded) for layer in range(slabs.num_layers)]
            for loading in copies:
                if loading is not None:
                    self._streams.hold(loading)
            if len(placement.begun):
                self._pages.index_fill_(1, upload([placement.begun.pages], self._pages.device)[0], 0)
            logits = steps.run(model, _on_pages(batch, placement))
            self._streams.end()
            if logits is not None:
                copies += [slabs.store(layer, placement.completed) for layer in range(slabs.num_layers)]
        finally:
            if logits is None:
                self.page_table.undo(placement)
            for copy in copies:
                if copy is not None:
                    copy.wait()
        if logits is not None:
            self.page_table.done(placement, placement.completed)
        return logits

    def load_ahead(self, slots: Sequence[int] | Int32Array) -> DeviceWork | None:
        loaded = self.page_table.place_ahead(slots)
        if loaded is None:
            return None
        if len(loaded):
            try:
                copy = self._slabs.load_ahead(loaded)
            except BaseException:
                self.page_table.forget(loaded.slots)
                raise
            self._loading.append(_LoadAhead(loaded.pages, copy))
        # They end in their order. Some of the blocks may be on their way for another sequence already.
        return next(reversed(self._loading_into(self.page_table.pages_of(slots))), None)

    def forget(self, slots: Sequence[int] | Int32Array) -> None:
        self.page_table.forget(slots)

    def copy_times(self) -> CopyTimes:
        return self._streams.times() if self._has_run else CopyTimes()

    def close(self) -> None:
        for loading in self._loading:
            loading.copy.wait()
        self._loading.clear()
        if self._pinned is not None:
            self._pinned.release()
            self._pinned = None

    def _begin(self, placement: PagePlacement) -> None:
        self._streams.begin(self._loading_into(np.concatenate(placement.pages)) if self._loading else ())
        self._has_run = True

    def _loading_into(self, pages: Int32Array) -> list[SlabCopy]:
        """The loads ahead that are still on their way into any of these."""
        self._loading = [one for one in self._loading if not one.copy.done()]
        return [one.copy for one in self._loading if np.isin(one.pages, pages).any()]

    def _place(self, batch: Sequence[SequenceChunk]) -> PagePlacement:
        """What is evicted is in the arena when this returns: it is rare, and its pages are written into at once."""
        self._has_run = False
        placement = self.page_table.place(batch)
        for layer in range(self._slabs.num_layers):
            if (storing := self._slabs.store(layer, placement.evicted)) is not None:
                storing.wait()
        return placement


def _on_pages(batch: Sequence[SequenceChunk], placement: PagePlacement) -> list[SequenceChunk]:
    return [replace(chunk, slots=pages) for chunk, pages in zip(batch, placement.pages, strict=True)]


def _num_pages(device: Device, slabs: torch.Tensor, workspace_bytes: int) -> int:
    """As many as the device has room for beside the attention's workspace, and no more than could ever be used."""
    page_bytes = slabs[0].numel() * slabs.dtype.itemsize
    num_pages = len(slabs) if device.most_pages is None else min(device.most_pages, len(slabs))
    if device.is_cuda:
        room = room_bytes(device.torch_device, device.memory_share) - workspace_bytes
        # One is nobody's, and of one size is what a block that is loaded ahead passes through on its way to the layers' pages.
        num_pages = min(num_pages, room // page_bytes - 2)
    if num_pages < 1:
        raise ConfigError(
            f"device_memory: the process's share of {device.torch_device}, {device.memory_share:.3g} of its memory, has no room for a page "
            f"of {page_bytes >> 10} KiB beside the weights and {workspace_bytes >> 20} MiB of workspace, or others have taken it"
        )
    return num_pages
