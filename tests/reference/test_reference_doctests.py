"""The examples in the docstrings of `mpisim.reference` do what they say."""

import doctest
import importlib

import pytest

MODULES = [
    "accumulation",
    "chunks",
    "data_parallel",
    "decoder",
    "memory",
    "mixed_precision",
    "mlp",
    "optimizers",
    "recompute",
    "zero",
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(f"mpisim.reference.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
