"""Does what the prefill core decides, with the real model, store and gateways."""
