"""Model families, all of them one decoder. The configuration, its readers and the registry do without torch; the layers need it."""
