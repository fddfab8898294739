"""Searches layouts of a config that fit a budget: `mpisim plan CONFIG --ranks N --budget B`.

    search.py   the grid of layouts, their exact forecasts, the order of those that fit
    file.py     a plan text, also an edited one, proved and priced
    text.py     the table for people and the rows for programs

Every layout is a real plan (`train.changes`); no rule of thumb decides, so a higher ZeRO stage is
taken only where its numbers are better. No messages; data is loaded once, for its exact bytes.
"""

from __future__ import annotations

from mpisim.planner.file import check_plan_file
from mpisim.planner.search import PRECISIONS, Search, search_layouts, write_config
from mpisim.planner.text import search_rows, search_text

__all__ = [
    "PRECISIONS",
    "Search",
    "check_plan_file",
    "search_layouts",
    "search_rows",
    "search_text",
    "write_config",
]
