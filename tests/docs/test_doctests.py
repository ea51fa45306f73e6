"""The examples in docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import jaxonnx

MODULES = [
    module.name
    for module in pkgutil.walk_packages(jaxonnx.__path__, "jaxonnx.")
    if not module.name.endswith("__main__")
]


@pytest.mark.deep
@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
