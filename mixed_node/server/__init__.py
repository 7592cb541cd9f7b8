"""Does what the core decides, with the real engine and real sockets."""
