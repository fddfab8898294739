"""Page bubbles: schedules run on a clock, beside published closed forms."""

from __future__ import annotations

from fractions import Fraction

from mpisim.cost.bubbles import Timeline, compute_lists, crossings, simulate
from mpisim.reproduce.rounding import EXACT
from mpisim.reproduce.rows import FORMULA, Page
from mpisim.reproduce.zero import Read

_P, _M, _V = 4, 8, 2
_ZB_P, _ZB_M = 8, 32
_UNEVEN = {"F": 3, "B": 4, "W": 2}
_EQUAL = {"F": 1, "B": 1, "W": 1}

# Columns of the README -> schedule of ours, and chunks of a device.
_COLUMNS = {
    "1F1B": ("one_f_one_b", 1),
    "ZB1P": ("zb_h1", 1),
    "ZB2P": ("zb_h2", 1),
    "ZBV": (None, 2),
    "V-Half": (None, 2),
    "V-Min": (None, 2),
}
_NO_V = (
    "its order of a V-shaped pipeline is the result of a search or of a table of offsets, no "
    "closed rule; it is not among our schedules"
)


def run(schedule: str, p: int, m: int, seconds: dict[str, int], v: int = 1) -> Timeline:
    """Run a schedule; 1F1B without weight tasks takes B + W for a backward."""
    if not schedule.startswith("zb_"):
        seconds = {"F": seconds["F"], "B": seconds["B"] + seconds.get("W", 0)}
    return simulate(compute_lists(schedule, p, m, v), seconds, v)


def build(read: Read) -> Page:
    """Make the page."""
    oracle = read("schedules")
    page = Page(
        "bubbles",
        "Pipeline bubbles and microbatches in flight",
        f"Bubbles as a share of time, or in units of time where F, B and W are given; microbatches "
        f"in flight in units of a whole stage's activations. Source: {oracle['source']}. Ours: the "
        f"compute-only lists of naive, GPipe, 1F1B, interleaved, ZB-H1 and ZB-H2 run on a clock of "
        f"whole numbers; messages take no time. At p = {_P}, m = {_M}, v = {_V} where nothing else "
        f"is said; Zero Bubble at p = {_ZB_P}, m = {_ZB_M}, where 2 p - 1 in flight is 1.875 p.",
        f"{EXACT}; a whole number of the README must be ours, rounded half up",
    )
    _add_forms(page, oracle)
    _add_zero_bubble(page, oracle)
    _add_readme(page, oracle["readme"])
    _add_simulated(page, oracle["simulated"])
    for name, text in oracle["v_in_flight"].items():
        if name != "provenance":
            page.irreproducible(f"in flight, {name}, p = {_ZB_P}", *_floor(text, _ZB_P), _NO_V)
    page.flaws = [
        "the forms count no message: a real 1F1B also waits one hop per stage and turn",
        "'bubble' is (p - 1) / m of the ideal time or (p - 1) / (m + p - 1) of the whole; both are "
        "printed under the one name",
        "p + (p - 1) / v in flight holds with more microbatches than stages; with m = p it is p",
        "the README's 2 for ZB2P's activations is 2 p - 1 over p, reached only as p grows",
    ]
    return page


def _floor(text: str, p: int) -> tuple[str, None]:
    from mpisim.reproduce.rounding import evaluate

    return str(evaluate(text, {"p": p})), None


def _add_forms(page: Page, oracle: dict) -> None:
    sizes = {"p": _P, "m": _M, "v": _V}
    chunks = {"gpipe": 1, "one_f_one_b": 1, "interleaved": _V}
    lines = {name: run(name, _P, _M, {"F": 1, "B": 2}, v) for name, v in chunks.items()}
    for name, line in lines.items():
        forms = oracle["bubble_over_ideal"]
        page.formula(
            f"bubble over ideal, {name}", forms[name], sizes, line.bubble_over_ideal,
            forms["provenance"],
        )  # fmt: skip
    for name in ("gpipe", "one_f_one_b"):
        forms = oracle["bubble_of_total"]
        page.formula(
            f"bubble of total, {name}", forms[name], sizes, lines[name].bubble_of_total,
            forms["provenance"],
        )  # fmt: skip
    forms = oracle["in_flight"]
    page.formula("in flight, gpipe", forms["gpipe"], sizes, lines["gpipe"].in_flight[0])
    for stage in range(_P):
        page.formula(
            f"in flight, one_f_one_b, stage {stage}", forms["one_f_one_b"],
            {**sizes, "stage": stage}, lines["one_f_one_b"].in_flight[stage],
        )  # fmt: skip
    page.formula(
        "in flight, interleaved, first stage", forms["interleaved, first stage"], sizes,
        lines["interleaved"].in_flight[0],
    )  # fmt: skip
    for stage in range(_P):
        kinds = [task.kind for task, _, _ in lines["one_f_one_b"].spans[stage]]
        # The last forward before the first backward is no warm-up: it begins the alternation.
        page.formula(
            f"warm-up forwards, one_f_one_b, stage {stage}", oracle["warm_up"]["one_f_one_b"],
            {**sizes, "stage": stage}, kinds.index("B") - 1,
        )  # fmt: skip


def _add_zero_bubble(page: Page, oracle: dict) -> None:
    forms = oracle["zero_bubble"]
    sizes = {"p": _ZB_P, "m": _ZB_M, **_UNEVEN}
    for name, text in forms["bubble"].items():
        ours = run(name, _ZB_P, _ZB_M, _UNEVEN).bubble
        page.formula(f"bubble, {name}, F 3 B 4 W 2", text, sizes, ours, forms["provenance"])
    for name, text in forms["in_flight"].items():
        ours = max(run(name, _ZB_P, _ZB_M, _UNEVEN).in_flight)
        page.formula(f"in flight, {name}", text, sizes, ours, forms["provenance"])
    for name, ratio in forms["ratio_when_all_equal"].items():
        ours = Fraction(run(name, _ZB_P, _ZB_M, _EQUAL).bubble, _ZB_P - 1)
        page.formula(f"bubble over p - 1, {name}, all equal", str(ratio), {}, ours, FORMULA)


def _add_readme(page: Page, readme: dict) -> None:
    base = run("one_f_one_b", _ZB_P, _ZB_M, _EQUAL)
    for number, (column, (schedule, chunks)) in enumerate(_COLUMNS.items()):
        line = run(schedule, _ZB_P, _ZB_M, _EQUAL) if schedule else None
        ours = {
            "bubble": Fraction(line.bubble, base.bubble) if line else None,
            "activations": max(line.in_flight) / max(base.in_flight) if line else None,
        }
        # A V comes back: the last device holds the middle of the model, the first both ends.
        there = list(range(_ZB_P))
        placement = there + there[::-1] if chunks == 2 else there
        ours["p2p_volume"] = Fraction(crossings(placement), crossings(there))
        for what, value in ours.items():
            item, cell = f"README, {column}, {what}", readme[what][number]
            if value is None:
                page.irreproducible(item, cell, None, _NO_V)
            elif "/" in cell:
                page.formula(item, cell, {}, value, readme["provenance"])
            else:
                page.printed(item, cell, value, readme["provenance"])


def _add_simulated(page: Page, cells: dict) -> None:
    for p, m, seconds in (
        (4, 8, {"F": 1, "B": 1}),
        (4, 8, {"F": 1, "B": 2}),
        (8, 32, {"F": 1, "B": 2}),
    ):
        line = run("one_f_one_b", p, m, seconds)
        row = next(
            row
            for row in cells["rows"]
            if (row["p"], row["m"], row["F"], row["B"]) == (p, m, seconds["F"], seconds["B"])
        )
        name = f"1F1B on a clock, p {p}, m {m}, F {seconds['F']}, B {seconds['B']}"
        page.printed(f"{name}: makespan", row["makespan"], line.makespan, cells["provenance"])
        if "ideal" in row:
            ideal = m * (seconds["F"] + seconds["B"])
            page.printed(f"{name}: ideal", row["ideal"], ideal, cells["provenance"])
        if "bubble_of_total" in row:
            page.formula(
                f"{name}: bubble", row["bubble_of_total"], {}, line.bubble_of_total,
                cells["provenance"],
            )  # fmt: skip
            for stage, (peak, ours) in enumerate(
                zip(row["in_flight"], line.in_flight, strict=True)
            ):
                item = f"{name}: in flight, stage {stage}"
                page.printed(item, peak, ours, cells["provenance"])
