"""Makes the helpers of these tests importable."""

from __future__ import annotations

import sys
from pathlib import Path

tests = Path(__file__).parents[1]
for folder in (tests, tests / "engine"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
