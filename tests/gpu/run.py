"""Run the GPU tests: ``python -m tests.gpu.run [pytest arguments]``."""

import sys
from pathlib import Path

import pytest

PLUGINS_OFF = ("-p", "no:cacheprovider", "-p", "no:benchmark")

if __name__ == "__main__":
    here = Path(__file__).parent
    sys.exit(pytest.main([str(here), "-m", "gpu", "-q", *PLUGINS_OFF, *sys.argv[1:]]))
