"""Plan texts, also edited ones: proved without the config, or refused with what is wrong."""

from __future__ import annotations

import random
import re

import pytest
from small_jobs import make_config

from mpisim.cost.price import price_rank
from mpisim.errors import ConfigError, PlanError
from mpisim.planner import check_plan_file
from mpisim.train import plan_text
from mpisim.train.setup import Setup


def made(tmp_path, zero=0, recompute="none"):
    config = make_config(
        tmp_path, train={"num_microbatches": 2}, parallel={"zero": zero, "bucket_bytes": 1},
        memory={"recompute": recompute},
    )  # fmt: skip
    path = tmp_path / "plan.txt"
    path.write_text(plan_text(config, 2))
    return config, path


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_plan_text_is_proved_and_priced(tmp_path, zero):
    config, path = made(tmp_path, zero)
    result = check_plan_file(path)
    plan = Setup(config, 2).full_plan()
    assert result.plan.ranks == plan.ranks
    assert result.priced == [price_rank(plan, rank) for rank in range(2)]
    assert result.text().splitlines()[1] == "ok: order, matching, deadlock, leaks"
    assert [row["rank"] for row in result.rows()] == [0, 1]


def edited(path, pattern, replacement):
    text, count = re.subn(pattern, replacement, path.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1
    path.write_text(text)


@pytest.mark.parametrize(
    ("pattern", "replacement", "kind", "says"),
    [
        (r"(StartSync bucket=0 .*count=)\d+", r"\g<1>7", PlanError, "got count=7"),
        (r"StartSync bucket=0", "StartSync bucket=9", PlanError, "bucket in 0..1; got .*bucket=9"),
        (r"^mesh dp=2", "mesh dp=3", PlanError, "got 3 with 2 ranks"),
        (r"^dtype float64", "dtype float8", PlanError, "line 4 must name one of .*float8"),
        (r"^algorithm auto", "algorithm best", PlanError, "line 5 must name one of .*best"),
        (r"^kind train", "kind trial", PlanError, "line 2 must name one of"),
        (r"micro=0 keep=all", "micro=one keep=all", ConfigError, r"plan line 1\d must be"),
        (r"^  Backward .*\n", "", PlanError, "rank"),
        (r"^  OptimizerStep.*\n", "", PlanError, "rank 0"),
        (r"^mpisim plan 1", "mpisim plan 2", ConfigError, "must start with"),
    ],
)
def test_an_edited_plan_is_refused_with_what_is_wrong(tmp_path, pattern, replacement, kind, says):
    _, path = made(tmp_path)
    edited(path, pattern, replacement)
    with pytest.raises(kind, match=says):
        check_plan_file(path)


@pytest.mark.parametrize(("zero", "recompute"), [(0, "full"), (2, "none"), (3, "none")])
def test_no_edit_crashes_the_check(tmp_path, zero, recompute):
    """A changed number, a lost line, a doubled line: refused, or another plan that is right."""
    _, path = made(tmp_path, zero, recompute)
    text = path.read_text()
    rng = random.Random(zero)
    refused = accepted = 0
    for _ in range(250):
        lines = text.splitlines()
        place = rng.randrange(len(lines))
        numbers = list(re.finditer(r"\d+", lines[place]))
        how = rng.random()
        if how < 0.6 and numbers:
            spot = rng.choice(numbers)
            line = lines[place]
            lines[place] = (
                f"{line[: spot.start()]}{rng.choice([0, 1, 2, 7, 99])}{line[spot.end() :]}"
            )
        elif how < 0.8:
            del lines[place]
        else:
            lines.insert(place, rng.choice(lines))
        path.write_text("\n".join(lines) + "\n")
        try:
            check_plan_file(path)
            accepted += 1
        except (ConfigError, PlanError):
            refused += 1
    # Rows, names and unchanged numbers are free; all else is not.
    assert refused > 4 * accepted


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "must exist"), (b"", "must start with"), (b"\xff\xfe", "must be text")],
)
def test_files_that_are_no_plan(tmp_path, content, says):
    path = tmp_path / "x.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        check_plan_file(path)
    with pytest.raises(ConfigError, match="must be readable"):
        check_plan_file(tmp_path)
