"""The committed overlap run still says what its README says, and the bar it stands for holds."""

import json
from pathlib import Path

from mpisim.report import report_rows
from mpisim.report.traces import overlap, read_traces

RUN = Path(__file__).parents[2] / "experiments" / "overlap" / "run"


def test_most_ring_steps_end_before_the_last_backward():
    traces, left_out = read_traces(RUN)
    assert left_out == 0 and len(traces) == 4
    found = overlap(traces, first_step=2)
    assert found.ring_steps == 4 * 28 * 5 * 4  # ranks, steps, buckets but the last, exchanges
    assert found.share >= 0.5
    for trace in traces:
        assert overlap([trace], first_step=2).share >= 0.5


def test_its_readme_quotes_its_trace():
    text = (RUN.parent / "README.md").read_text()
    traces, _ = read_traces(RUN)
    for label, chosen in [("all", traces), *((str(t.rank), [t]) for t in traces)]:
        found = overlap(chosen, first_step=2)
        assert f"| {label} | {found.ring_steps} | {found.hidden} | {found.share:.1%} |" in text


def test_its_bytes_were_the_predicted_ones():
    differences = [
        value
        for row in report_rows(RUN)
        for name, value in row.items()
        if name.endswith("difference") or name == "diff"
    ]
    summary = json.loads((RUN / "summary.json").read_text())
    assert summary["bytes_matrix"] == summary["predicted_bytes_matrix"]
    assert not any(differences)
