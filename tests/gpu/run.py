"""Run the GPU tests without arguments to remember: ``python -m tests.gpu.run [pytest arguments]``."""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    here = Path(__file__).parent
    sys.exit(pytest.main([str(here), "-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", *sys.argv[1:]]))
