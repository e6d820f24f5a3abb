"""A server, measured from outside."""
