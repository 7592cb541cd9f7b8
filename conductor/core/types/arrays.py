"""The arrays of numbers that the core and its C part share."""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.void]
"""Of a StructuredArray."""

_TYPES = {"Ints": np.int64, "Floats": np.float64}


class StructuredArray:
    """A table that C reads or writes. The annotations of a subclass, Ints or Floats, are its fields. native/structs.h has a struct of its
    name, in the singular, with the same in the same order.

    `rows` are the table, and `view` is how they go to C: numpy works out anew each time what fields they have. The fields are columns of
    them, made once: most events write an item or two, which a column takes in a third of the time that a row does.
    """

    dtype: ClassVar[np.dtype[np.void]]

    def __init_subclass__(cls) -> None:
        cls.dtype = np.dtype([(name, _TYPES[kind]) for name, kind in cls.__annotations__.items()])

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.view = rows.data
        for name in self.dtype.names or ():
            setattr(self, name, rows[name])

    @classmethod
    def zeros(cls, count: int) -> Self:
        return cls(np.zeros(count, cls.dtype))

    def __len__(self) -> int:
        return len(self.rows)

    def extended(self, rows: Rows) -> Self:
        """The same with further rows behind."""
        return type(self)(np.concatenate([self.rows, rows]))
