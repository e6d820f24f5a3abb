"""``python -m minuet``."""

import sys

from minuet.cli import main

if __name__ == "__main__":
    sys.exit(main())
