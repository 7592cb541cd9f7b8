"""What the Conductor wants done at the nodes, as conductor.server.orders has it done: copies of prefixes, and instances that switch their
role."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from conductor.core.replication.planner import MOST_COPIES
from conductor.core.types.events import Action, Replicate, ReplicationEnded, SwitchRole
from node_runtime.role_switch import LOOK_EVERY_S, Drain
from simulator.cluster.loop import Loop
from simulator.cluster.mixed import SimMixed
from simulator.cluster.network import Network
from simulator.cluster.options import ClusterOptions
from simulator.cluster.prefill import SimPrefill
from simulator.cluster.replication import SimReplication
from simulator.cluster.store import SimStore
from springtide.ids import NodeId


class SimOrders:
    """`switch` does an order of its kind, `tell` takes events to the Conductor."""

    def __init__(
        self,
        options: ClusterOptions,
        loop: Loop,
        network: Network,
        stores: Mapping[NodeId, SimStore],
        tell: Callable[[ReplicationEnded], object],
        switch: Callable[[SwitchRole], None],
    ) -> None:
        self.replicated_bytes = 0
        self.failed_replications = 0
        self.role_switches = 0
        self._conductor, self._rpc_s = options.conductor, options.rpc_s
        self._loop, self._network, self._stores, self._tell, self._switch = loop, network, stores, tell, switch
        self._replications: dict[NodeId, SimReplication] = {}
        """Of the stores that were ever to take a copy."""
        self._waiting: deque[Replicate] = deque()
        self._copying = 0

    def give(self, actions: Iterable[Action]) -> None:
        """Begins to do those that are orders."""
        for action in actions:
            match action:
                case Replicate():
                    self._waiting.append(action)
                    self._copy_next()
                case SwitchRole():
                    self.role_switches += 1
                    self._later(partial(self._switch, action))

    def _copy_next(self) -> None:
        while self._waiting and self._copying < MOST_COPIES:
            self._copying += 1
            self._later(partial(self._copy, self._waiting.popleft()))

    def _copy(self, order: Replicate) -> None:
        def ended(held_blocks: int, fetched_blocks: int) -> None:
            self._later(partial(self._ended, order, held_blocks, fetched_blocks))

        self._replication(order.node_id).take(order, ended)

    def _ended(self, order: Replicate, held_blocks: int, fetched_blocks: int) -> None:
        failed = held_blocks < len(order.keys)
        self._copying -= 1
        self.failed_replications += failed
        self.replicated_bytes += fetched_blocks * self._conductor.bytes_per_block
        self._tell(ReplicationEnded(order.node_id, order.keys[-1], fetched_blocks, failed))
        self._copy_next()

    def _replication(self, node_id: NodeId) -> SimReplication:
        replication = self._replications.get(node_id)
        if replication is None:
            conductor = self._conductor
            replication = self._replications[node_id] = SimReplication(
                self._stores[node_id],
                self._stores,
                conductor.bytes_per_block,
                conductor.replication_node_bytes_per_s,
                self._loop,
                self._network,
            )
        return replication

    def _later(self, do: Callable[[], None]) -> None:
        """After the way to whoever is to do it, or back."""
        self._loop.after(self._rpc_s, do)


class SimRoleSwitch:
    """Calls `over` once the instance has had no work for a moment, or `drain_s` after the beginning."""

    def __init__(self, instance: SimPrefill | SimMixed, drain_s: float, loop: Loop, over: Callable[[], None]) -> None:
        self._instance, self._loop, self._over = instance, loop, over
        self._drain = Drain(drain_s, loop.now)
        self._look()

    def _look(self) -> None:
        if self._drain.look(self._instance.has_work, self._loop.now) is not None:
            self._over()
        else:
            self._loop.after(LOOK_EVERY_S, self._look)
