"""Matrix products with weights: what they compute, and in what the weights are kept."""

from __future__ import annotations

import pytest
import torch

from engine.layers.linear import Linear, packed_dtype


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_the_exact_one_rounded_once(rows: int, dtype: torch.dtype, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, 96), (40, 96)))
    bias = torch.randn(40, generator=generator).to(dtype) if biased else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    product = Linear(weight, bias)(x)
    assert product.dtype == dtype and product.shape == (rows, 40)
    torch.testing.assert_close(product.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("supported", [False, True])
def test_weights_in_bfloat16_are_packed_in_float32_where_the_processor_has_no_products_of_bfloat16(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    weight = torch.zeros(8, 8)
    assert packed_dtype(weight) == torch.float32
    assert packed_dtype(weight.to(torch.bfloat16)) == (torch.bfloat16 if supported else torch.float32)
    assert packed_dtype(weight.to(torch.float16)) is None
    assert packed_dtype(weight.to("meta")) is None
