"""Kernels of the operators."""
