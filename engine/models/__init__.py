"""Model families. `config`, the readers and `registry` do without torch; the families' modules are imported when weights are loaded."""
