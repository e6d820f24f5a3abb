"""Backend in Triton: NVIDIA first; the same sources compile for AMD."""
