"""The example of docs/simulator.md runs and does what it says."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.sim
PAGE = Path(__file__).parents[2] / "docs" / "simulator.md"


def test_the_example_doubles_the_first_ten(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    exec(example, {})
    printed = capsys.readouterr().out
    numbers = [float(x) for x in re.findall(r"[\d.]+", printed)]
    assert numbers == [*[2.0 * n for n in range(10)], 10.0, 11.0]
