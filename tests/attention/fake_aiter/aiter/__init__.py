"""A stand-in for ROCm's aiter: enforces the contract of its paged decode, computes in FP32."""
