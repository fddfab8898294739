"""`mpisim plan`: the search by its short name, the ops of a step, a plan text that is proved."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from mpisim.cli import main
from mpisim.config import load_config
from mpisim.plan.text import parse_plan, plan_text
from mpisim.planner.text import _cells
from mpisim.train.overview import op_flops
from mpisim.train.setup import Setup

PIPELINE = """
train.steps = 2
train.global_batch = 16
train.num_microbatches = 4
data.kind = "text"
data.path = "no/such/file"
data.window = 8
model.kind = "decoder"
model.d_model = 16
model.num_blocks = 6
model.num_heads = 2
parallel.pp = 4
"""


@pytest.fixture
def pipeline(tmp_path):
    path = tmp_path / "pipeline.toml"
    path.write_text(PIPELINE)
    return path


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        f'run.dir = "{tmp_path}/runs"\ntrain.steps = 2\ntrain.global_batch = 24\n'
        'data.kind = "regression"\ndata.num_rows = 60\nmodel.hidden = [16, 16]\n'
    )
    return path


def complaint(capsys):
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    (line,) = err.splitlines()
    return line.removeprefix("mpisim: ")


@pytest.mark.parametrize("words", [["plan"], ["plan", "search"]])
def test_the_search_by_both_names(config, capsys, words):
    assert main([*words, str(config), "--ranks", "2", "--budget", "1MiB"]) == 0
    out = capsys.readouterr().out
    assert "fit, best first:" in out and "\x1b" not in out
    last = out.splitlines()[-1]
    assert last == f"run it: mpisim train {config} --ranks 2 --set memory.budget_bytes=1048576"


def test_options_may_come_before_the_config(config, capsys):
    assert main(["plan", "--ranks", "2", "--budget", "1MiB", "--json", str(config)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["place"] == 1 and rows[0]["fits"] and rows[0]["budget_bytes"] == 1 << 20


def test_the_config_may_say_the_budget(config, capsys):
    words = ["plan", str(config), "--ranks", "1", "--set", "memory.budget_bytes=1MiB", "--no-data"]
    assert main(words) == 0
    assert "without the data set" in capsys.readouterr().out


def test_nothing_fits_is_status_1(config, capsys):
    assert main(["plan", str(config), "--ranks", "2", "--budget", "100KiB"]) == 1
    out, err = capsys.readouterr()
    assert "nothing fits. The nearest layout is" in out and "bytes too many" in out
    assert "run it" not in out and err == ""


def test_the_search_of_a_pipeline_says_what_it_leaves_as_it_is(pipeline, capsys):
    """Every block is a bucket there, whatever the bucket size; stages are those of the config."""
    words = [
        "--set", "parallel.schedule=interleaved", "--set", "parallel.chunks=2", "--set",
        "model.num_blocks=8", "--no-data",
    ]  # fmt: skip
    assert main(["plan", str(pipeline), "--ranks", "8", "--budget", "1GiB", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "8 ranks (dp 2 x pp 4, interleaved, 8 stages on 4 places of axis pp, 2 chunks each), "
        "1.00 GiB each ("
    )
    head = lines.index("fit, best first:") + 1
    column = lines[head].index("bucket") + len("bucket")
    assert {line[column - 8 : column] for line in lines[head + 1 : head + 9]} == {"by block"}
    words += ["--json", "--budget", "1GiB"]
    assert main(["plan", str(pipeline), "--ranks", "8", *words]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["pp"], row["schedule"], row["chunks"]) for row in rows} == {(4, "interleaved", 2)}


def test_the_search_without_stages_says_its_buckets(config, capsys):
    assert main(["plan", str(config), "--ranks", "2", "--budget", "1MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 ranks, 1.00 MiB each (")
    words = ["--budget", "1MiB", "--json", "--set", "parallel.bucket_bytes=300000"]
    assert main(["plan", str(config), "--ranks", "2", *words]) == 0
    shown = {(row["zero"], _cells(row)[3]) for row in json.loads(capsys.readouterr().out)}
    assert {zero for zero, _ in shown} == {0, 1, 2, 3}
    assert all((size == "by block") == (zero == 3) for zero, size in shown), shown


def test_write_and_run_what_it_says(config, tmp_path, capsys):
    path = tmp_path / "best.toml"
    words = ["plan", str(config), "--ranks", "2", "--budget", "160KiB", "--write", str(path)]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"run it: mpisim train {path} --ranks 2"
    assert load_config(path).memory.budget_bytes == 160 << 10
    assert main(["check", str(path), "--ranks", "2"]) == 0
    capsys.readouterr()
    assert main(words) == 2
    assert "must be new" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ranks", "2", "--budget", "1MB"], "size must be a number with a unit of B, KiB, MiB"),
        (["--ranks", "2"], "the budget must be at least 1 byte; got 0"),
        (["--budget", "1MiB"], "Missing option '--ranks'"),
        (["--ranks", "5", "--budget", "1MiB"], "train.global_batch must be divisible"),
        (
            ["--ranks", "2", "--set", "memory.budget_bytes=5parsecs"],
            "memory.budget_bytes must be a number with a unit of B, KiB, MiB, GiB, TiB; got",
        ),
    ],
)
def test_what_is_refused(config, capsys, words, says):
    assert main(["plan", str(config), *words]) == 2
    assert says in complaint(capsys)


def test_help_explains_the_search_and_the_commands(capsys):
    assert main(["plan", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "mpisim plan CONFIG --ranks N [--budget SIZE]" in out
    assert "parallel.pp, schedule, chunks and split are not searched" in out
    for word in ("--budget SIZE", "--precision [keep|if-needed|any]", "--write FILE", "--no-data"):
        assert word in out
    for command in ("check Prove the plan", "search Search a layout", "show Print the plan"):
        assert command in out


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from mpisim.cli import main; main(['plan', '--help']); "
        "print(*[n for n in ('numpy', 'rich', 'pydantic', 'mpi4py') if n in sys.modules], 'end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "end"


def test_a_plan_text_and_its_edit(config, tmp_path, capsys):
    assert main(["plan", "show", str(config), "--ranks", "2"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "plan.txt"
    path.write_text(text)
    assert main(["plan", "check", str(path)]) == 0
    assert "ok: order, matching, deadlock, leaks" in capsys.readouterr().out
    number = next(n for n, x in enumerate(text.splitlines(), 1) if "StartSync" in x)
    count = text.split("StartSync")[1].split("count=")[1].split()[0]
    path.write_text(text.replace(f"count={count}", "count=3", 1))
    assert main(["plan", "check", str(path)]) == 1
    assert f"plan line {number} must move all {count} elements" in complaint(capsys)
    path.write_text(text.replace("micro=0", "micro=x", 1))
    assert main(["plan", "check", str(path)]) == 2
    assert "must be an op or a head line" in complaint(capsys)


def test_a_plan_without_stages_is_shown_as_its_ops(config, capsys):
    """So it has always been, and scripts read it."""
    outputs = []
    for words in ([], ["--ops"]):
        assert main(["plan", "show", str(config), "--ranks", "2", *words]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] == plan_text(Setup(load_config(config), 2).full_plan())


def test_a_pipeline_is_shown_as_a_grid(pipeline, capsys):
    assert main(["plan", "show", str(pipeline), "--ranks", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "1f1b: 4 stages, 4 microbatches"
    assert lines[2:7] == [
        "  slot    0  1  2  3  4  5  6  7  8  9  10 11 12 13",
        "  rank 0  F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3",
        "  rank 1  .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .",
        "  rank 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .",
        "  rank 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .",
    ]
    table = next(n for n, line in enumerate(lines) if "share of cost" in line)
    rows = [line.split() for line in lines[table + 1 : table + 5]]
    plan = Setup(load_config(pipeline), 4).full_plan()
    for rank, row in enumerate(rows):
        assert row[0] == str(rank)
        held = sum(spec.size for bucket in plan.rank_buckets(rank) for spec in bucket.params)
        assert int(row[1].replace(",", "")) == held
        assert row[3] == str(4 - rank)
        assert row[4] == plan.rank_blocks(rank)[0] and row[-1] == plan.rank_blocks(rank)[-1]
    assert lines[table + 5] == "  in flight: most microbatches whose activations a rank keeps"
    assert sum(float(row[2].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.3)
    assert "  idle in this grid: 3/7 = 42.9%" in lines
    assert any(line.startswith("  predicted stall share: ") for line in lines)


def test_the_prediction_follows_the_cluster(pipeline, capsys):
    """Slow links leave more idle than the schedule alone; speed alone changes no share."""
    shares = []
    for words in (
        [], ["--set", "cluster.flops_per_s=1e6"], ["--set", "cluster.latency_s=0.01"],
        ["--set", "cluster.bytes_per_s=1e5"],
    ):  # fmt: skip
        assert main(["plan", "show", str(pipeline), "--ranks", "4", *words]) == 0
        out = capsys.readouterr().out
        shares.append(float(re.search(r"predicted stall share: ([\d.]+)%", out)[1]))
    assert shares[0] == shares[1] < min(shares[2:])
    assert 30 < shares[0] < 60
    assert "links of 0 s and 100000 bytes/s" in out


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_stages_share_out_the_operations_of_the_model(pipeline, schedule, recompute):
    """What the prediction adds up, over all ranks: every block once per microbatch and way."""
    overrides = (f"parallel.schedule={schedule}", f"memory.recompute={recompute}")
    setup = Setup(load_config(pipeline, overrides), 4)
    plan = setup.full_plan()
    found = sum(
        op_flops(setup, plan, rank, op) for rank, ops in enumerate(plan.ranks) for op in ops
    )
    specs = setup.specs(plan.rows[0][0])
    again = {
        "none": 0,
        "selective": sum(spec.interior_flops for spec in specs[1:-1]),
        "full": sum(spec.forward_flops for spec in specs[1:-1]),
    }
    once = sum(spec.forward_flops + spec.backward_flops for spec in specs)
    assert found == 4 * (once + again[recompute])


def test_equal_stages_stall_as_the_grid_says(tmp_path, capsys):
    """Blocks of nearly equal cost, no embedding and no wide head: what is idle is predicted."""
    path = tmp_path / "equal.toml"
    path.write_text(
        'data.kind = "regression"\ndata.num_rows = 60\ndata.num_features = 32\n'
        f"data.num_targets = 32\nmodel.hidden = {[32] * 15}\ntrain.global_batch = 8\n"
        "train.num_microbatches = 8\nparallel.pp = 4\n"
    )
    assert main(["plan", "show", str(path), "--ranks", "4"]) == 0
    out = capsys.readouterr().out
    assert "idle in this grid: 3/11 = 27.3%" in out
    share = float(re.search(r"predicted stall share: ([\d.]+)%", out)[1])
    assert share == pytest.approx(27.3, abs=3)


def test_the_ops_of_a_pipeline_are_read_back(pipeline, tmp_path, capsys):
    words = ["--set", "parallel.schedule=zb-h1", "--set", "parallel.dp=2"]
    assert main(["plan", "show", str(pipeline), "--ranks", "8", "--ops", *words]) == 0
    text = capsys.readouterr().out
    assert len(parse_plan(text).ranks) == 8
    path = tmp_path / "plan.txt"
    path.write_text(text)
    assert main(["plan", "check", str(path)]) == 0
    assert "ok: order, matching, deadlock, leaks" in capsys.readouterr().out
    lines = text.splitlines()
    del lines[next(n for n, line in enumerate(lines) if "RecvGrad" in line)]
    path.write_text("\n".join(lines) + "\n")
    assert main(["plan", "check", str(path)]) == 1
    err = capsys.readouterr().err
    assert "backward must follow the receive of the gradient of block block1, which rank 1" in err
    last = err.splitlines()[-1]
    assert last == "mpisim: Add RecvGrad boundary=0 micro=0 peer=1 before it."


def test_chunks_and_replicas_are_shown(pipeline, capsys):
    words = [
        "parallel.schedule=interleaved", "parallel.chunks=2", "model.num_blocks=8",
        "parallel.dp=2", "parallel.zero=2", "memory.recompute=full",
    ]  # fmt: skip
    words = [part for word in words for part in ("--set", word)]
    assert main(["plan", "show", str(pipeline), "--ranks", "8", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "interleaved: 8 stages on 4 places of axis pp, 2 chunks each, 4 microbatches, 2 replicas\n"
    )
    # A group of four, and of the next forward one per rank that lies before: not rounded up.
    for rank in range(4):
        most = min(2 * (4 - rank - 1) + 4 + 1, 8) / 2
        assert re.search(rf"^  {rank}, {rank + 4} +[\d,]+ +\S+ +{most:g}  ", out, re.MULTILINE)
    assert "a rank keeps; one of its 2 chunks counts 1/2\n" in out
    assert "  ranks 3, 7  .   .   .   F0a" in out and "a, b: chunk of the rank" in out
    assert re.search(r"^  0, 4 .* \| ", out, flags=re.MULTILINE)


def test_a_picture_is_written_where_it_is_asked_for(pipeline, tmp_path, capsys, monkeypatch):
    from mpisim.train import overview

    calls = []
    monkeypatch.setattr(overview, "write_picture", lambda view, out: calls.append((view, out)))
    out = tmp_path / "plan.png"
    assert main(["plan", "show", str(pipeline), "--ranks", "4", "--png", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == f"wrote {out}" and printed.err == ""
    assert [(view.title, path) for view, path in calls] == [("1f1b: 4 stages, 4 microbatches", out)]


def test_a_picture_without_the_scripts_or_their_library_is_refused(
    pipeline, tmp_path, capsys, monkeypatch
):
    """An installed package has no plots/; matplotlib is an extra."""
    import importlib.util

    import mpisim

    out = tmp_path / "plan.png"
    words = ["plan", "show", str(pipeline), "--ranks", "4", "--ops", "--png", str(out)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(words) == 2
    assert "pictures must have matplotlib" in capsys.readouterr().err
    monkeypatch.setattr(mpisim, "__file__", str(tmp_path / "mpisim" / "__init__.py"))
    assert main(words) == 2
    assert "drawn from a checkout, where plots/ is" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("name", ["no folder/x.png", "run.toml/x.png", "x" * 300 + ".png"])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_printed(
    pipeline, tmp_path, capsys, monkeypatch, name
):
    """No folder, no folder but a file, and a folder that refuses the file."""
    from mpisim.train import overview

    (tmp_path / "run.toml").write_text("")
    monkeypatch.setattr(overview, "view_plan", lambda *_: pytest.fail("too late"))
    out = tmp_path / name
    before = sorted(tmp_path.iterdir())
    assert main(["plan", "show", str(pipeline), "--ranks", "4", "--png", str(out)]) == 2
    said = complaint(capsys)
    assert said.startswith(
        f"a picture must go into a folder that exists and can be written to; got {out} ("
    )
    assert said.endswith("). Make the folder, or name another file.") and "Errno" not in said
    assert sorted(tmp_path.iterdir()) == before


def test_asking_whether_a_picture_can_be_written_leaves_nothing(tmp_path):
    from mpisim.train.overview import require_picture

    out = tmp_path / "x.png"
    out.write_bytes(b"a picture of before")
    require_picture(out)
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
    assert out.read_bytes() == b"a picture of before"
