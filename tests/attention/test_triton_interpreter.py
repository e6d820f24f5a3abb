"""The reduced suite in Triton's interpreter."""

import pytest

from tests import interpreted

pytest.importorskip("triton")


@pytest.mark.sim
def test_the_kernels_agree_with_the_reference_on_the_cpu():
    assert interpreted.run("tests.attention.triton_conformance") >= 19
