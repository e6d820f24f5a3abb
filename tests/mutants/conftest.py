"""The tests that are run against mutants come with their profile."""

from tests.attention import conftest as _profile  # noqa: F401
