"""Tensor parallelism (Shoeybi et al., Megatron-LM, arXiv 1909.08053): the heads and the feed-forwards' inner dimensions of each layer are
shared out among the ranks of one node, whose partial sums are added twice a layer. Each rank writes and reads its own heads of the slabs,
so that what is stored and sent is the same whatever the degree."""
