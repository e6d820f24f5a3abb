"""Backend in FlyDSL: AMD, on pages in the shuffle form."""
