"""Device code of the operations."""
