"""The words that the cluster's processes exchange: one frozen type for each, and one codec between them and the messages of `proto/`."""
