"""How minuet-tiny is made; README.md says it. Not part of the package."""
