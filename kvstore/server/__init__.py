"""The store process, which does with real sockets and real memory what the core decides. What is below does not know what is above:

process.py, store.py    the process of a node; the parts put together
service/                what is asked of a store, by its engine, other stores, Conductors and operators
transfer/               every way on which blocks come and go
shared/                 what the parts share: the pool, the peers, the SSD, who watches
"""
