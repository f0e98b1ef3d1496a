"""Tiny checkpoints and server processes, for the demo, the tests and the benchmarks."""
