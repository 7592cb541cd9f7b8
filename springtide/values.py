"""Values: what the processes say to one another and the cores take in and give out, made by the thousand each second.

A frozen dataclass of a dozen fields takes 1.3 us to make, for Python sets each field by a call that goes around its own lock, and 0.1 us
without the lock. So `value_class` is `dataclass` to whoever reads or checks the code, types included, and at run time nothing stands in the
way of who writes to one regardless.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as value_class
else:
    from dataclasses import dataclass

    def value_class(*, frozen, slots):
        assert frozen and slots, "a value is frozen and has slots"
        return dataclass(slots=True, unsafe_hash=True)


__all__ = ["value_class"]
