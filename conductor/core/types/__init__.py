"""The words of the core: events in, decisions out, and the figures that they rest on."""
