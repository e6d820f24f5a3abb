"""Hypothesis without a deadline: a shared machine may pause any example for longer than that."""

from hypothesis import settings

settings.register_profile("minuet", settings.default, deadline=None)
settings.load_profile("minuet")
