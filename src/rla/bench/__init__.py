"""Benchmarks: `rla bench kernels` (attend over lengths, beside its peers) and `rla bench decode` (the one-token step)."""
