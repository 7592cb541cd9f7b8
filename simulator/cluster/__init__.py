"""A cluster in virtual time: the cores that are shipped, with a modelled engine and network beneath them."""

from simulator.cluster.cluster import Cluster
from simulator.cluster.options import ClusterOptions

__all__ = ["Cluster", "ClusterOptions"]
