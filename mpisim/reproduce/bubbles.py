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

# Columns of the README -> schedule of ours. Its entries are for many devices: ours is how much a
# figure grows per added device, from the first to the second of these counts.
_COLUMNS = {
    "1F1B": "one_f_one_b",
    "ZB1P": "zb_h1",
    "ZB2P": "zb_h2",
    "ZBV": "v_zb",
    "V-Half": "v_half",
    "V-Min": "v_min",
}
_FEW, _MANY = 8, 14
_V_SHAPED = ("v_min", "v_half", "v_zb")
_ZBV = (
    "ours (one repeating pattern, weight gradients where a device would wait) keeps as little, and "
    "leaves p - 1 units of half a stage idle; the published order, which has none, is not given by "
    "a closed rule"
)


def run(schedule: str, p: int, m: int, seconds: dict[str, int], v: int = 1) -> Timeline:
    """Run a schedule; one without weight tasks takes B + W for a backward.

    `seconds` are those of a stage, or of each of the v chunks of a device.
    """
    if schedule not in _V_SHAPED and not schedule.startswith("zb_"):
        seconds = {"F": seconds["F"], "B": seconds["B"] + seconds.get("W", 0)}
    return simulate(compute_lists(schedule, p, m, v), seconds, 2 if schedule in _V_SHAPED else v)


def build(read: Read) -> Page:
    """Make the page."""
    oracle = read("schedules")
    page = Page(
        "bubbles",
        "Pipeline bubbles and microbatches in flight",
        f"Bubbles as a share of time, or in units of time where F, B and W are given; microbatches "
        f"in flight in units of a whole stage's activations. Source: {oracle['source']}. Ours: the "
        f"compute-only lists of GPipe, 1F1B, interleaved, Zero Bubble and V-shaped schedules run "
        f"on a clock of whole numbers; messages take no time. At p = {_P}, m = {_M}, v = {_V}; "
        f"Zero Bubble and V at p = {_ZB_P}, m = {_ZB_M}. README rows are relative to 1F1B and hold "
        f"for many devices: ours is the growth per added device from p = {_FEW} to {_MANY}.",
        EXACT,
    )
    _add_forms(page, oracle)
    _add_zero_bubble(page, oracle)
    _add_readme(page, oracle["readme"])
    _add_simulated(page, oracle["simulated"])
    for name in _V_SHAPED:
        ours = max(run(name, _ZB_P, _ZB_M, _EQUAL).in_flight)
        forms = oracle["v_in_flight"]
        page.formula(f"in flight, {name}", forms[name], {"p": _ZB_P}, ours, forms["provenance"])
    page.flaws = [
        "the forms count no message: a real 1F1B also waits one hop per stage and turn",
        "'bubble' is (p - 1) / m of the ideal time or (p - 1) / (m + p - 1) of the whole; both are "
        "printed under the one name",
        "p + (p - 1) / v in flight holds with more microbatches than stages; with m = p it is p",
        "the README's activations are limits: 2 p - 1 over p for ZB2P is 1.875 at p = 8, (p + 4) "
        "// 3 over p for V-Min is 1/2 there",
        "V-Min's bubble is 2/3 plus O(n), which stands for uneven times; with F = B = W it is 2/3",
    ]
    return page


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


def _growth(schedule: str) -> dict[str, Fraction]:
    """Return bubble, activations and messages per added device, F = B = W, a stage 6 units."""
    unit = 1 if schedule in _V_SHAPED else 2
    ends = []
    for p in (_FEW, _MANY):
        line = run(schedule, p, 4 * p, dict.fromkeys("FBW", unit))
        # A V comes back: the first device holds both ends of the model, the last its middle.
        placement = list(range(p)) + list(range(p))[::-1] * (schedule in _V_SHAPED)
        ends.append((Fraction(line.bubble), max(line.in_flight), crossings(placement)))
    names = ("bubble", "activations", "p2p_volume")
    return {
        name: Fraction(many - few, _MANY - _FEW)
        for name, few, many in zip(names, *ends, strict=True)
    }


def _add_readme(page: Page, readme: dict) -> None:
    base = _growth("one_f_one_b")
    for number, (column, schedule) in enumerate(_COLUMNS.items()):
        for what, value in _growth(schedule).items():
            item, cell, ours = f"README, {column}, {what}", readme[what][number], value / base[what]
            if (column, what) == ("ZBV", "bubble"):
                page.irreproducible(item, cell, ours, _ZBV)
            else:
                page.formula(item, cell, {}, ours, readme["provenance"])


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
        name = f"clock, p {p}, m {m}, F {seconds['F']}, B {seconds['B']}"
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
