"""One pass over pages: each layer's slabs come before its attention and go after it, beside the computing."""

from __future__ import annotations

import torch

from engine.backends.base import AttentionPass, HeadNorms
from engine.batch import LayerHooks
from engine.device.streams import DeviceWork, SlabCopy, Streams
from engine.kv_cache.page_table import PagePlacement, Pairs
from engine.layers.rope import Rotation


class Slabs:
    """The same slabs twice: `host` [slots, layers, 2, block_tokens, kv_heads, head_dim] in the arena, `pages` [layers, pages, …] on the
    device."""

    def __init__(self, host: torch.Tensor, pages: torch.Tensor, streams: Streams) -> None:
        self._host = host
        self._pages = pages
        self.streams = streams
        self.num_layers = len(pages)

    def load(self, layer: int, pairs: Pairs) -> SlabCopy | None:
        """Begins to load the slabs of a layer; None where there is nothing to do."""
        if not len(pairs):
            return None
        device, host = self._slabs(layer, pairs)
        return self.streams.load(device, host)

    def load_ahead(self, pairs: Pairs) -> SlabCopy:
        """Loads all layers at once: the fewer the copies, the sooner the thread that launches them has time for a pass again."""
        device = [self._pages.select(1, page) for page in pairs.pages.tolist()]
        return self.streams.load_ahead(device, [self._host.select(0, slot) for slot in pairs.slots.tolist()])

    def store(self, layer: int, pairs: Pairs) -> SlabCopy | None:
        if not len(pairs):
            return None
        device, host = self._slabs(layer, pairs)
        return self.streams.store(host, device)

    def _slabs(self, layer: int, pairs: Pairs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        device, host = self._pages[layer], self._host[:, layer]
        # There may be thousands: `select` takes a fifth of what an index in brackets does.
        return [device.select(0, page) for page in pairs.pages.tolist()], [host.select(0, slot) for slot in pairs.slots.tolist()]


class PagedPass(AttentionPass):
    """Around a pass of an attention backend whose slots are pages."""

    def __init__(self, inner: AttentionPass, placement: PagePlacement, slabs: Slabs, in_step: bool) -> None:
        """`in_step`: other ranks compute the same layers. Each stores what it writes in a layer before it takes part in the layer's sums:
        when these are there, all have stored it."""
        self.positions = inner.positions
        self.placement = placement
        self.stored: Pairs = placement.completed
        """What goes to the arena. With hooks, all that is written."""
        self._inner = inner
        self._slabs = slabs
        self._in_step = in_step
        self._loading: dict[int, SlabCopy] = {}
        self._storing: dict[int, DeviceWork] = {}
        self._summed: dict[int, DeviceWork] = {}
        """In step: of each layer that was launched, all of it."""
        self._gate: _Gate | None = None

    def begin(self, hooks: LayerHooks | None) -> LayerHooks | None:
        """Returns what is to be called around the layers. Without hooks all that is to be loaded is in the arena already: the copies of all
        layers are launched at once."""
        if hooks is None:
            for layer in range(self._slabs.num_layers):
                self._load(layer)
            return None
        self.stored = self.placement.written
        self._gate = _Gate(hooks, self)
        return self._gate

    def run(self, layer: int, qkv: torch.Tensor, rotation: Rotation, norms: HeadNorms | None) -> torch.Tensor:
        if self._gate is not None:
            self._load(layer)
        if (loading := self._loading.get(layer)) is not None:
            self._slabs.streams.hold(loading)
        result = self._inner.run(layer, qkv, rotation, norms)
        storing = self._slabs.store(layer, self.stored)
        if storing is not None:
            self._storing[layer] = storing
            if self._in_step:
                storing.wait()
        return result

    def launched(self, layer: int) -> None:
        """The layer was. A sum with other ranks on a device is launched long before they have come to it."""
        if self._in_step:
            self._summed[layer] = self._slabs.streams.launched()

    def awaited(self, layer: int) -> list[DeviceWork]:
        """What is done when the layer's slabs are in the arena, those of all ranks."""
        return [works[layer] for works in (self._storing, self._summed) if layer in works]

    def finish(self) -> None:
        """Returns when nothing is on its way any more, and every layer has been told of."""
        if self._gate is not None:
            self._gate.tell(waits=True)
        else:
            self.launched(self._slabs.num_layers - 1)
        self.settle()

    def settle(self) -> None:
        """Returns when no slab of the arena is read or written for this pass any more, by any rank that goes along with it."""
        for work in (*self._loading.values(), *self._storing.values(), *self._summed.values()):
            work.wait()

    def _load(self, layer: int) -> None:
        loading = self._slabs.load(layer, self.placement.loaded)
        if loading is not None:
            self._loading[layer] = loading


class _Gate:
    """Calls `after` of a layer only when its slabs are in the arena: looked after before and after each layer is launched, and waited for
    at the end alone. The host runs ahead of the device, so that `before` and the copies of a layer come while those before it
    compute."""

    def __init__(self, hooks: LayerHooks, of: PagedPass) -> None:
        self._hooks = hooks
        self._pass = of
        self._launched = 0
        self._told = 0

    def before(self, layer: int) -> None:
        self.tell(waits=False)
        self._hooks.before(layer)

    def after(self, layer: int) -> None:
        self._pass.launched(layer)
        self._launched = layer + 1
        self.tell(waits=False)

    def tell(self, waits: bool) -> None:
        """Of the layers whose slabs are in the arena, in their order; with `waits`, of all that are launched."""
        while self._told < self._launched:
            for work in self._pass.awaited(self._told):
                if not work.done():
                    if not waits:
                        return
                    work.wait()
            self._told += 1
            self._hooks.after(self._told - 1)
