"""Paged attention by FlashInfer's kernels (Ye et al., arXiv 2501.01005) over a device's pages, which are laid out as it wants them (NHD).

Each pass is planned once for each window that layers have, and run once a layer: by the decode kernel where every sequence has one new
token, by the prefill kernel otherwise. Queries and keys are rotated before, as everywhere here, and keys and values put into their pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.backends.base import AttentionBackend, AttentionPass, FixedStep, HeadNorms
from engine.backends.flashinfer.paged_batch import PagedBatch, paged_batch
from engine.backends.plain import PlainOps
from engine.batch import SequenceChunk
from engine.device.memory import upload
from engine.layers.rope import Rotary, Rotation
from engine.model_config import RopeConfig

_LEAST_WORKSPACE_BYTES = 394 << 20
_TILE_ROWS = 128
"""Queries, of all heads of a group, that a block of threads takes at most."""
_TRIAL_TOKENS = 16
"""Of a page."""
_STEP_PAGES = 8
"""Entries of a fixed step's page table for each page that there is: sequences share pages."""
_TENSOR_CORES_FROM = 4
"""So many heads to a KV head make the decode kernel for tensor cores the faster one; the other is made for groups up to 3, and 8."""


def workspace_bytes(multiprocessors: int, most_fixed: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """The memory that FlashInfer takes beside the pages: it splits sequences among a device's multiprocessors, and keeps what each part
    comes to, in float32 with its sum, until all are put together. A FixedStep is planned with as many parts as keep all of these busy, or
    as it has sequences, however few there are; the largest one has `most_fixed`."""
    parts = max(2 * multiprocessors // kv_heads, most_fixed)
    return max(_LEAST_WORKSPACE_BYTES, heads * parts * _TILE_ROWS * (head_dim + 1) * torch.float32.itemsize)


def workspace_of(device: torch.device, most_fixed: int, slabs: torch.Tensor, heads: int) -> int:
    """The bytes of it on `device` for pages like `slabs` [..., kv_heads, head_dim]; none on a CPU."""
    if device.type != "cuda":
        return 0
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return workspace_bytes(multiprocessors, most_fixed, heads, slabs.shape[-2], slabs.shape[-1])


class FlashInferAttention(AttentionBackend):
    def __init__(self, library: Any, most_fixed: int, pages: torch.Tensor, heads: int, windows: Sequence[int | None]) -> None:
        """`library` is the module `flashinfer`. `pages` [pages, layers, 2, block_tokens, kv_heads, head_dim], each layer's contiguous.
        `most_fixed`: the size of the largest `fixed_step`."""
        self._library = library
        self._shape = PagesShape(pages, heads)
        self._layers = Layers(pages, windows, self._shape)
        self._workspace = torch.zeros(workspace_of(pages.device, most_fixed, pages, heads), dtype=torch.uint8, device=pages.device)
        prefill, decode = library.BatchPrefillWithPagedKVCacheWrapper, library.BatchDecodeWithPagedKVCacheWrapper
        tensor_cores = self._shape.group >= _TENSOR_CORES_FROM
        self._prefill = {window: prefill(self._workspace, "NHD") for window in set(windows)}
        self._decode = {window: decode(self._workspace, "NHD", use_tensor_cores=tensor_cores, backend="fa2") for window in set(windows)}
        self._tensor_cores = tensor_cores
        self._turn = Turn(pages.device)

    def plan(self, batch: Sequence[SequenceChunk]) -> AttentionPass:
        shape = self._shape
        table = paged_batch(batch, shape.block_tokens, shape.num_pages)
        positions, key_rows, begun_pages, pages = upload(
            [table.positions, table.key_rows, table.begun_pages, table.pages], self._workspace.device
        )
        is_step = len(positions) == len(batch)
        wrappers, plan = (self._decode, shape.plan_decode) if is_step else (self._prefill, shape.plan_prefill)
        with self._turn:
            for window, wrapper in wrappers.items():
                plan(wrapper, table, pages.int(), window)
        return _Pass(self._layers, wrappers, positions, key_rows, begun_pages if len(begun_pages) else None)

    def fixed_step(self, size: int) -> FixedStep:
        return _FixedStep(self._library, self._layers, self._shape, self._workspace, self._turn, size, self._tensor_cores)


class PagesShape:
    """Geometry of the pages, as the wrappers' plans want it."""

    def __init__(self, pages: torch.Tensor, heads: int) -> None:
        self.num_pages, _, _, self.block_tokens, self.kv_heads, self.head_dim = pages.shape
        self.heads = heads
        self.group = heads // self.kv_heads
        self._dtype = pages.dtype

    def plan_prefill(self, wrapper: Any, table: PagedBatch, pages: torch.Tensor, window: int | None) -> None:
        """What a plan looks at on the host is given to it there: `pages` alone, int32, is on the device."""
        row_begins, page_begins, last_page_tokens = map(torch.from_numpy, (table.row_begins, table.page_begins, table.last_page_tokens))
        wrapper.plan(
            row_begins,
            page_begins,
            pages,
            last_page_tokens,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.block_tokens,
            causal=True,
            **self._options(window),
        )

    def plan_decode(self, wrapper: Any, table: PagedBatch, pages: torch.Tensor, window: int | None) -> None:
        page_begins, last_page_tokens = map(torch.from_numpy, (table.page_begins, table.last_page_tokens))
        wrapper.plan(
            page_begins,
            pages,
            last_page_tokens,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.block_tokens,
            **self._options(window),
        )

    def _options(self, window: int | None) -> dict[str, Any]:
        """FlashInfer does not count the token itself among those that its window reaches."""
        return {
            "pos_encoding_mode": "NONE",
            "sm_scale": self.head_dim**-0.5,
            "window_left": -1 if window is None else window - 1,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }


class Layers:
    """The pages and the window of each layer."""

    def __init__(self, pages: torch.Tensor, windows: Sequence[int | None], shape: PagesShape) -> None:
        self.pages = [pages[:, layer] for layer in range(len(windows))]
        self.windows = windows
        self._shape = shape
        assert all(layer.is_contiguous() for layer in self.pages)

    def attend(
        self, layer: int, wrapper: Any, qkv: torch.Tensor, key_rows: torch.Tensor, rotation: Rotation, norms: HeadNorms | None
    ) -> torch.Tensor:
        """Attends as AttentionPass.run does; `wrapper` is planned."""
        heads, kv_heads = self._shape.heads, self._shape.kv_heads
        positioned, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if norms is not None:
            norm = PlainOps().norm
            positioned = torch.cat((norm(positioned[:, :heads], norms.query), norm(positioned[:, heads:], norms.key)), 1)
        rotated = rotation(positioned)
        rows = self.pages[layer].view(-1, kv_heads, self._shape.head_dim)
        rows.index_copy_(0, key_rows, rotated[:, heads:])
        rows.index_copy_(0, key_rows + self._shape.block_tokens, value)
        result: torch.Tensor = wrapper.run(rotated[:, :heads].contiguous(), self.pages[layer])
        return result


class _Pass(AttentionPass):
    def __init__(
        self,
        layers: Layers,
        wrappers: dict[int | None, Any],
        positions: torch.Tensor,
        key_rows: torch.Tensor,
        begun_pages: torch.Tensor | None,
    ) -> None:
        self.positions = positions
        self._layers = layers
        self._wrappers = wrappers
        self._key_rows = key_rows
        self._begun_pages = begun_pages

    def run(self, layer: int, qkv: torch.Tensor, rotation: Rotation, norms: HeadNorms | None) -> torch.Tensor:
        if self._begun_pages is not None:
            # A partial block must not carry to another node what a former owner has left behind it.
            self._layers.pages[layer].index_fill_(0, self._begun_pages, 0)
        wrapper = self._wrappers[self._layers.windows[layer]]
        return self._layers.attend(layer, wrapper, qkv, self._key_rows, rotation, norms)


class Turn:
    """A plan is written into memory of the host, from which the device copies it when it comes to that: the next one must not be written
    there before. `with` it around the plans of a pass."""

    def __init__(self, device: torch.device) -> None:
        self._planned = torch.cuda.Event() if device.type == "cuda" else None

    def __enter__(self) -> None:
        if self._planned is not None:
            self._planned.synchronize()

    def __exit__(self, *error: object) -> None:
        if self._planned is not None:
            self._planned.record()


class _FixedStep(FixedStep):
    def __init__(
        self, library: Any, layers: Layers, shape: PagesShape, workspace: torch.Tensor, turn: Turn, size: int, tensor_cores: bool
    ) -> None:
        device = workspace.device
        # Both at once are copied to from the host.
        self._inputs = torch.zeros(2, size, dtype=torch.int64, device=device)
        self.positions, self._key_rows = self._inputs
        self._layers = layers
        self._shape = shape
        self._turn = turn
        self._most_pages = _STEP_PAGES * shape.num_pages
        self._wrappers = {
            window: library.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=tensor_cores,
                paged_kv_indptr_buffer=torch.zeros(size + 1, dtype=torch.int32, device=device),
                paged_kv_indices_buffer=torch.zeros(self._most_pages, dtype=torch.int32, device=device),
                paged_kv_last_page_len_buffer=torch.zeros(size, dtype=torch.int32, device=device),
                backend="fa2",
            )
            for window in set(layers.windows)
        }

    def fill(self, batch: Sequence[SequenceChunk]) -> bool:
        table = paged_batch(batch, self._shape.block_tokens, self._shape.num_pages)
        if len(table.pages) > self._most_pages:
            return False
        positions, key_rows, pages = upload([table.positions, table.key_rows, table.pages], self._inputs.device)
        self._inputs.copy_(torch.stack((positions, key_rows)))
        with self._turn:
            for window, wrapper in self._wrappers.items():
                self._shape.plan_decode(wrapper, table, pages.int(), window)
        return True

    def run(self, layer: int, qkv: torch.Tensor, rotation: Rotation, norms: HeadNorms | None) -> torch.Tensor:
        wrapper = self._wrappers[self._layers.windows[layer]]
        return self._layers.attend(layer, wrapper, qkv, self._key_rows, rotation, norms)


def try_out(library: Any, device: torch.device, dtype: torch.dtype, group: int, head_dim: int, windows: Sequence[int | None]) -> None:
    """Computes a little of what models with such heads need, over pages that are thrown away. Raises whatever prevents it: kernels are
    built when they are first used, unless they came precompiled."""
    pages = torch.zeros(len(windows), 2, 2, _TRIAL_TOKENS, 1, head_dim, dtype=dtype, device=device).transpose(0, 1)
    attention = FlashInferAttention(library, 0, pages, group, windows)
    for tokens in (2, 1):
        planned = attention.plan([SequenceChunk([0] * tokens, 0, (page,)) for page in range(2)])
        rotation = Rotary(RopeConfig(), head_dim, device=device)(planned.positions)
        for layer in range(len(windows)):
            planned.run(layer, torch.zeros(2 * tokens, group + 2, head_dim, dtype=dtype, device=device), rotation, None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
