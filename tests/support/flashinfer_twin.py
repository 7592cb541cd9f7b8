"""FlashInfer's wrappers in plain torch, with the signatures of 0.7: what they compute is worked out from the page table that they are
planned with, so that a wrong one shows. Stands in for the module `flashinfer`, whose kernels need a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class _Wrapper:
    """Keys are read page by page; everything behind a sequence's last token is left out, as the kernels do it."""

    def __init__(self) -> None:
        self.plans: list[dict[str, Any]] = []

    def _remember(
        self, qo_indptr: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, **how: Any
    ) -> None:
        assert all(array.dtype == torch.int32 for array in (qo_indptr, indptr, indices, last_page_len))
        assert len(indptr) == len(qo_indptr) == len(last_page_len) + 1 and indptr[-1] == len(indices)
        self._table = [array.clone() for array in (qo_indptr, indptr, indices, last_page_len)]
        self._how = how
        self.plans.append({"qo_indptr": qo_indptr, "indptr": indptr, "indices": indices, "last_page_len": last_page_len, **how})

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        qo_indptr, indptr, indices, last_page_len = (array.tolist() for array in self._table)
        how = self._how
        _, two, page_size, kv_heads, head_dim = paged_kv_cache.shape
        assert (two, page_size, kv_heads, head_dim) == (2, how["page_size"], how["num_kv_heads"], how["head_dim"])
        assert q.is_contiguous() and q.shape == (qo_indptr[-1], how["num_qo_heads"], head_dim) and paged_kv_cache.is_contiguous()
        assert q.dtype == how["q_data_type"] and paged_kv_cache.dtype == how["kv_data_type"]
        out = torch.empty_like(q)
        for i, last in enumerate(last_page_len):
            assert 1 <= last <= page_size
            own = indices[indptr[i] : indptr[i + 1]]
            length = (len(own) - 1) * page_size + last
            keys, values = (paged_kv_cache[own, kind].reshape(-1, kv_heads, head_dim)[:length].transpose(0, 1) for kind in (0, 1))
            rows = slice(qo_indptr[i], qo_indptr[i + 1])
            query = q[rows].transpose(0, 1)
            at = torch.arange(length - query.shape[1], length)[:, None]
            columns = torch.arange(length)[None]
            seen = columns <= at
            if how["window_left"] >= 0:
                seen &= columns >= at - how["window_left"]
            group = query.shape[0] // kv_heads
            attended = F.scaled_dot_product_attention(
                query, keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0), seen, scale=how["sm_scale"]
            )
            out[rows] = attended.transpose(0, 1)
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        super().__init__()
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert causal and pos_encoding_mode == "NONE", "not what is worked out here"
        self._remember(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            page_size=page_size,
            sm_scale=sm_scale,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type or q_data_type,
        )


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        assert kv_layout == "NHD" and backend == "fa2"
        self._fixed_size = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None and paged_kv_indices_buffer is not None and paged_kv_last_page_len_buffer is not None
            self._fixed_size = len(paged_kv_last_page_len_buffer)
            self._most_pages = len(paged_kv_indices_buffer)
            assert len(paged_kv_indptr_buffer) == self._fixed_size + 1

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        assert pos_encoding_mode == "NONE"
        if self._fixed_size is not None:
            assert len(last_page_len) == self._fixed_size and len(indices) <= self._most_pages
        self._remember(
            torch.arange(len(indptr), dtype=torch.int32),
            indptr,
            indices,
            last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            sm_scale=sm_scale,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type or q_data_type,
        )


def rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return F.rms_norm(input, weight.shape, weight, eps)


def fused_add_rmsnorm(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    residual += input
    input.copy_(F.rms_norm(residual, weight.shape, weight, eps))


def silu_and_mul(input: torch.Tensor) -> torch.Tensor:
    gate, up = input.chunk(2, -1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(input: torch.Tensor) -> torch.Tensor:
    gate, up = input.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up
