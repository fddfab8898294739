"""Published tables beside ours: `published, ours, difference`, page by page.

    rounding.py      when a value agrees with a printed one; formulas written as text
    rows.py          `Row`, `Page`, what counts, JSON
    text.py          a page for people
    oracles/*.json   what others published, with source and provenance: facts, read for one column
    zero.py ...      one module per page: its `build` makes the rows

What stands in the column "ours" never comes from an oracle: sizes of models are in the modules,
values from `memory.formulas`, `memory.published`, `cost.bubbles` and `layouts.steps`. `cli` calls
`reproduce`; `plots/reproduce.py` calls the functions that the pages call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mpisim.errors import ConfigError

PAGES = (
    "zero-table1", "zero-table2", "korthikanti", "playbook", "estimators", "busbw", "bubbles",
)  # fmt: skip
"""Names that `reproduce` knows, beside `all`."""


@dataclass(frozen=True)
class Reproduction:
    """One page or all of them."""

    rows: list[dict[str, Any]]
    """Fields page, item, published, ours, difference, provenance, ok; plain JSON."""
    text: str
    num_wrong: int
    """Rows whose `ok` is false, derived ones included."""


def reproduce(name: str, read: Callable[[str], Mapping[str, Any]] | None = None) -> Reproduction:
    """Compare what others published with ours.

    Parameters
    ----------
    name : str
        One of `PAGES`, or ``all``.
    read : callable, optional
        Returns the data of an oracle by its name; by default the files of the package.

    Returns
    -------
    Reproduction

    Raises
    ------
    ConfigError
        There is no such page.

    Notes
    -----
    In a row `provenance` says what the published value is: ``printed``, ``figure-data`` and
    ``printed formula`` count; ``derived`` (worked out from a source's formulas) is compared and
    shown, and does not count. ``known_irreproducible`` cells, ``measured`` ones, named parts of a
    gap and context have `ok` null, because nothing can be true or false about them.
    """
    if name != "all" and name not in PAGES:
        import difflib

        near = difflib.get_close_matches(name.lower(), [*PAGES, "all"], n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"NAME must be one of {', '.join(PAGES)} or all; got {name!r}. Did you mean {near}?"
        )
    from mpisim.reproduce import bubbles, busbw, estimators, korthikanti, playbook, zero
    from mpisim.reproduce.rows import read_oracle
    from mpisim.reproduce.text import page_text, totals_text

    builders = {
        "zero-table1": zero.build_table1,
        "zero-table2": zero.build_table2,
        "korthikanti": korthikanti.build,
        "playbook": playbook.build,
        "estimators": estimators.build,
        "busbw": busbw.build,
        "bubbles": bubbles.build,
    }
    pages = [builders[page](read or read_oracle) for page in (PAGES if name == "all" else (name,))]
    texts = [page_text(page) for page in pages]
    if name == "all":
        texts.append(totals_text(pages))
    return Reproduction(
        [row.as_json(page.name) for page in pages for row in page.rows],
        "\n\n".join(texts) + "\n",
        sum(row.ok is False for page in pages for row in page.rows),
    )
