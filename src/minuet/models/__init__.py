"""Models: a registry, strict loading, and one folder per model with the same file names."""
