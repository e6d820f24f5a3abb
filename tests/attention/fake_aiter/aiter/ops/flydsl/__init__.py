"""Operators written in FlyDSL."""
