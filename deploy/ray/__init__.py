"""A cluster whose prefill and decode nodes are placed by Ray: what is wanted, where it goes, and what becomes of it when a part is lost.

Ray places and restarts; nothing that serves a request knows of it. The placer, a process beside the head's others, is the one that speaks
with Ray. On each node an actor, the agent, starts a process that is not its child, and so outlives it, its Ray node and Ray's head: that is
`springtide node`, and learns from the cluster's Valkey whether it is still wanted.
"""
