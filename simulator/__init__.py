"""A cluster of any size on a virtual clock: the decision code of the real one, with the engine and the network modelled."""
