"""Evaluations: questions asked over the HTTP API, answers kept, and comparisons that can fail."""
