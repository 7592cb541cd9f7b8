"""What the Conductor decides: free of I/O, clock and randomness. `ConductorCore.handle(event, now) -> list[Action]` is the way in."""
