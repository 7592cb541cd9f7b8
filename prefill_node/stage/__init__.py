"""A stage of a prefill group: its part of every pass, and the way of the activations from stage to stage."""
