"""Does what the decode core decides, with the real model, store and gateways."""
