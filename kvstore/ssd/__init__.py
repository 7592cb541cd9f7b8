"""The SSD tier: KV blocks in files that survive a restart."""
