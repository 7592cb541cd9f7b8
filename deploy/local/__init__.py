"""A whole cluster on one machine: which processes it has, and the supervisor that keeps them running."""
