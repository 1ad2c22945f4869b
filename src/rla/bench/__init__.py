"""Benchmarks: `rla bench kernels` (attend over lengths, beside its peers), `rla bench decode` (the one-token step) and
`rla bench threads` (several threads beside one).
"""
