"""The operations in Triton's interpreter."""

import pytest

from tests import interpreted

pytest.importorskip("triton")


@pytest.mark.sim
def test_the_operations_agree_with_plain_torch_on_the_cpu():
    assert interpreted.run("tests.ops.interpreter") >= 16
