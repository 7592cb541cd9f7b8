"""Angles of rotation by position."""

from __future__ import annotations

import torch

from engine.layers.rope import Rotary
from engine.model_config import RopeConfig


def test_the_table_has_each_position_s_angles_and_grows_without_moving_what_was_given_out() -> None:
    rotary = Rotary(RopeConfig(), 64)
    small = rotary.table(10)
    before = [part.clone() for part in small]
    large = rotary.table(5000)
    assert len(large[0]) >= 5000 and rotary.table(4999)[0] is large[0]
    assert all(torch.equal(*pair) for pair in zip(small, before, strict=True))
    positions = torch.tensor([0, 3, 9, 1234, 4999])
    for part, alone in zip(large, rotary.angles(positions), strict=True):
        assert torch.allclose(part[positions], alone, atol=1e-6)
    assert all(torch.equal(part[:10], first[:10]) for part, first in zip(large, small, strict=True))


def test_the_table_ends_where_the_context_does() -> None:
    rotary = Rotary(RopeConfig(), 64, num_positions=100)
    assert [len(rotary.table(end)[0]) for end in (10, 60, 100)] == [20, 100, 100]
