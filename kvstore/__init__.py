"""The paged KV pool: arena, index, eviction, leases and events of one node (`core`), the process around them (`server`), the engine's
side (`link`)."""
