"""One format, to stderr; data goes to stdout."""

import logging
import sys

from minuet import env


def get_logger(name: str) -> logging.Logger:
    """Logger below ``minuet``; the first call installs the handler.

    The level comes from ``MINUET_LOG_LEVEL``.
    """
    root = logging.getLogger("minuet")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s", "%H:%M:%S")
        )
        root.addHandler(handler)
        root.propagate = False
    root.setLevel(env.values().log_level.upper())
    return logging.getLogger(name)
