"""Option ``--full``: run also what takes many minutes (marker ``full``); `make test-all` does."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run also the tests that are marked full")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "full: a whole product of settings; runs with --full only (make test-all)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
