"""The rdma transport: one-sided READ and WRITE over reliable-connected queue pairs, by pyverbs."""
