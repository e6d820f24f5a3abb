"""Measuring a step and a server: ``minuet bench``. docs/benchmarking.md explains the figures."""
