"""The operations in Triton; see ``docs/kernels.md``."""
