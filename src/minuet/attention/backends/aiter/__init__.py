"""Optional adapter to aiter's paged decode on AMD. Nothing here imports it until it is launched."""
