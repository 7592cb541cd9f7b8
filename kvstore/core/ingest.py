"""The receiving side of a hand-over: which slabs have arrived, and from whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from springtide.errors import InvalidRequest
from springtide.protocol.storage import Unit, Writer


@dataclass(slots=True)
class Ingest:
    """The coverage of blocks [present, num_blocks) of one prompt, a bitmap over the layers each. Those before `present` are not written."""

    num_layers: int
    num_blocks: int
    present: int
    writer: Writer | None = None
    first_token: int | None = None
    closed: bool = False
    """Nothing more is expected: complete, or given up by the writer."""
    _coverage: list[int] = field(init=False)
    _missing: int = field(init=False)

    def __post_init__(self) -> None:
        self._coverage = [0] * (self.num_blocks - self.present)
        self._missing = len(self._coverage)

    @property
    def complete(self) -> bool:
        """Whether all of it has arrived and been sealed."""
        return self._missing == 0 and self.first_token is not None

    @property
    def missing_blocks(self) -> int:
        """Blocks of which at least one layer has not arrived."""
        return self._missing

    def cover(self, unit: Unit) -> None:
        """Marks the slabs of `unit` as arrived. Repeats change nothing. Raises InvalidRequest when it reaches outside of the prompt."""
        if not (0 <= unit.layer_begin < unit.layer_end <= self.num_layers and 0 <= unit.block_begin < unit.block_end <= self.num_blocks):
            raise InvalidRequest(f"{unit} is outside of {self.num_layers} layers and {self.num_blocks} blocks")
        full = (1 << self.num_layers) - 1
        arrived = ((1 << (unit.layer_end - unit.layer_begin)) - 1) << unit.layer_begin
        for i in range(max(unit.block_begin - self.present, 0), unit.block_end - self.present):
            before = self._coverage[i]
            self._coverage[i] = before | arrived
            if before != full and self._coverage[i] == full:
                self._missing -= 1
