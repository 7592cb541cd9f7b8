"""What can be chosen about the rdma transport."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RdmaOptions:
    devices: tuple[str, ...] = ()
    """`mlx5_0`, or `mlx5_0:1` for one of its ports; none named: every active port."""
    traffic_class: int = 0
    """Of RoCE packets: the DSCP that the fabric's lossless class goes by, times 4."""
    connect_timeout_s: float = 3.0
    silence_s: float = 0.8
    """A path on which nothing comes back for so long is given up. NICs report a lost peer themselves, sooner than this as a rule."""
    secret: bytes | None = field(default=None, repr=False)
    """The cluster's: only who knows it gets a queue pair. Without one, the control RPC speaks with this machine only."""
    open_to_strangers: bool = False
    """Does without a secret on other addresses than loopback too: whoever reaches the port can read and write the region."""

    def __post_init__(self) -> None:
        if self.silence_s <= 0:
            raise ValueError(f"RdmaOptions.silence_s must be above 0, not {self.silence_s}")
        if not 0 <= self.traffic_class <= 255:
            raise ValueError(f"RdmaOptions.traffic_class must be between 0 and 255, not {self.traffic_class}")
