"""The tcp transport: a control lane and several data lanes to a peer, bytes straight from and to registered memory (docs/wire.md)."""
