"""The paged cache: layout arithmetic (plain data), the pool, and the only writer."""
