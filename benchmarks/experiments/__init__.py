"""The experiments of the Mooncake paper (arXiv 2407.00079, sections 7 and 8), in the simulator (`make experiments`)."""
