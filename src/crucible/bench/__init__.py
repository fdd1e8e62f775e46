"""Benchmarks: every number that the project quotes comes from one of these, with the ceiling beside it."""
