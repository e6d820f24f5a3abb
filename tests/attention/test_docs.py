"""The examples of the attention documents are what the code does."""

import doctest
from pathlib import Path

import pytest

from minuet.attention import dispatch

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["contract.md", "layouts.md"])
def test_examples_of_a_document_hold(name):
    dispatch.forget()
    result = doctest.testfile(str(DOCS / name), module_relative=False)
    assert result.attempted > 5
    assert result.failed == 0
