"""The same folders as in ``tests/models``."""

from tests.models.conftest import _one_thread, checkpoint

__all__ = ["_one_thread", "checkpoint"]
