"""FlashInfer's kernels on CUDA."""
