"""The store process: does with real sockets and real memory what the core decides."""
