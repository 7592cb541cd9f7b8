"""Kernels in C for bfloat16 on a CPU (engine/native)."""
