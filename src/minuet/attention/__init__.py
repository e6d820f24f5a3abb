"""Paged attention: the decision half is plain data, the backends carry it out.

Importing this package imports neither torch nor a compiler (a test starts a fresh interpreter to
check), so it stays empty: import the module you need.
"""
