"""Makes the helpers of these tests importable, with the details of their failed assertions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for folder in (Path(__file__).parent, Path(__file__).parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

pytest.register_assert_rewrite("contract", "collective_checks", "reduction_checks")
