"""What is learnt and predicted: lengths of outputs, times between tokens, waits in queues."""
