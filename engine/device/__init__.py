"""Where the paged cache is not the arena: pages of an accelerator's memory, and the copies between them and the arena."""
