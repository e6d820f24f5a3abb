"""Backend in plain tensor operations: what CI runs, and what a GPU-less machine serves with."""
