"""From a config to model, mesh and plans; the static check; `mpisim.run`."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from small_jobs import make_config

import mpisim
import mpisim.train
from mpisim.config import config_from_mapping, dump_config
from mpisim.data.footprint import held_batch_bytes
from mpisim.errors import ConfigError
from mpisim.plan.check import check_plan
from mpisim.plan.text import parse_plan
from mpisim.train.setup import Setup, build_model, check

# --- setup -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "ranks", "micros", "proposed"),
    [(25, 2, 1, 24), (24, 5, 1, 20), (24, 2, 5, 20), (3, 4, 1, 4), (1, 3, 2, 6)],
)
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest(
    tmp_path, batch, ranks, micros, proposed
):
    """Issue 2, bad input: batch not divisible."""
    config = make_config(tmp_path, train={"global_batch": batch, "num_microbatches": micros})
    with pytest.raises(ConfigError) as caught:
        Setup(config, ranks)
    text = str(caught.value)
    assert text.startswith("train.global_batch must be divisible by ranks * ")
    assert f"got {batch} with {ranks} * {micros} = {ranks * micros}" in text
    assert f"Set train.global_batch = {proposed} " in text
    fixed = make_config(tmp_path, train={"global_batch": proposed, "num_microbatches": micros})
    Setup(fixed, ranks)  # the remedy works


def test_ranks_that_do_not_match_the_mesh_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="parallel.dp must equal the number of ranks"):
        Setup(make_config(tmp_path, parallel={"dp": 2}), 3)


def test_rows_of_ranks_and_microbatches(tmp_path):
    """Disjoint, covering, sizes that differ by one at most, also for a short batch."""
    setup = Setup(make_config(tmp_path, train={"num_microbatches": 2}), 3)
    assert setup.signature(24) == ((4, 4), (4, 4), (4, 4))
    assert setup.signature(10) == ((2, 2), (2, 1), (2, 1))
    assert setup.signature(2) == ((1, 0), (1, 0), (0, 0))
    for rows in range(30):
        assert sum(map(sum, setup.signature(rows))) == rows


def test_plans_are_built_once_per_shape(tmp_path):
    setup = Setup(make_config(tmp_path), 3)
    assert setup.full_plan() is setup.full_plan() is setup.train_plan(24)
    assert setup.train_plan(23) is not setup.full_plan()
    assert setup.eval_plan(5) is setup.eval_plan(5)
    assert setup.specs(4) is setup.specs(4)
    for plan in (setup.full_plan(), setup.train_plan(1), setup.eval_plan(3000)):
        check_plan(plan)


def test_a_large_evaluation_is_cut_by_rank(tmp_path):
    setup = Setup(make_config(tmp_path), 2)
    assert setup.eval_plan(3).rows == ((2,), (1,))
    assert setup.eval_plan(1).rows == ((1,), (0,))
    assert setup.eval_plan(2048).rows == ((1024,), (1024,))
    assert setup.eval_plan(2049).rows == ((513, 512), (1024,))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("regression", ["block0", "head"]),
        ("text", ["embed", "block0", "head"]),
    ],
)
def test_the_model_of_a_config(tmp_path, kind, names):
    model = build_model(make_config(tmp_path, kind))
    assert [block.name for block in model.blocks] == names
    assert (model.loss_layer.__class__.__name__ == "SoftmaxCrossEntropy") == (kind == "text")


@pytest.mark.parametrize("kind", ["regression", "text"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_bytes_of_a_row_are_those_of_the_data(tmp_path, kind, dtype):
    import numpy as np

    from mpisim.data.load import load_data

    config = make_config(tmp_path, kind, model={"dtype": dtype})
    batch = load_data(config).train_batch(np.arange(6))
    assert len(batch.arrays()) == 2
    assert sum(array.nbytes for array in batch.arrays()) == held_batch_bytes(config, 6)


@pytest.mark.parametrize(("layout", "arrays"), [("packed", 3), ("padded", 2)])
@pytest.mark.parametrize("length", [None, 5])
def test_the_bytes_of_a_decoder_row_are_those_of_the_data(tmp_path, layout, arrays, length):
    """Token ids, targets and, packed, the starts of documents, four bytes each."""
    import numpy as np

    from mpisim.data.load import load_data

    config = make_config(
        tmp_path, "text", model={"kind": "decoder"}, data={"layout": layout, "window": 12}
    )
    assert held_batch_bytes(config, 1, length) == arrays * 4 * (length or 12)
    batch = load_data(config).train_batch(np.arange(3))
    assert len(batch.arrays()) == arrays
    assert sum(array.nbytes for array in batch.arrays()) == held_batch_bytes(config, 3)


# --- check and plan show ---------------------------------------------------------------------


def test_check_prices_every_rank_without_data_and_without_a_run_directory(tmp_path):
    text = {"kind": "text", "path": "no/such/file"}
    config = make_config(tmp_path, "regression").model_dump(mode="json") | {"data": text}
    config = config_from_mapping(config)
    report = check(config, 4)
    rows = report.rows()
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    for rank, row in enumerate(rows):
        assert row["ops"] == len(report.plan.ranks[rank])
        assert row["dp_all_reduce_sent_bytes"] > 0
        assert row["peak_total_bytes"] == report.memory[rank].peak_total
        assert row["peak_op"]
    text = report.text()
    assert "ok: order, matching, deadlock, leaks" in text
    assert len(text.splitlines()) == 4 + 4
    assert not (tmp_path / "runs").exists()


def test_the_text_of_a_plan_is_that_of_the_full_step(tmp_path):
    config = make_config(tmp_path)
    assert parse_plan(mpisim.train.plan_text(config, 3)) == Setup(config, 3).full_plan()
    assert mpisim.train.check(config, 2).plan == Setup(config, 2).full_plan()


# --- mpisim.run ------------------------------------------------------------------------------


def test_a_config_in_every_form_makes_the_same_run(tmp_path):
    """Issue 2, item 2: `mpisim.run(config)` does the same job from Python."""
    config = make_config(tmp_path)
    values = config.model_dump(mode="json")
    file = tmp_path / "run.toml"
    file.write_text(dump_config(config), encoding="utf-8")
    digests = set()
    for form in (config, values, MappingProxyType(values), str(file), file):
        result = mpisim.run(form, ranks=2, transport="local", overwrite=True)
        assert result.path == tmp_path / "runs" / "run"
        assert set(result.params) == {
            "block0.linear.weight", "block0.linear.bias", "head.linear.weight", "head.linear.bias",
        }  # fmt: skip
        digests |= {rank["params_sha256"] for rank in result.summary["ranks"]}
    assert len(digests) == 1


def test_the_number_of_ranks_is_that_of_the_config_by_default(tmp_path):
    config = make_config(tmp_path, parallel={"dp": 3})
    assert mpisim.run(config, transport="local").record["ranks"] == 3


@pytest.mark.parametrize("ranks", [None, 0, -1])
def test_a_number_of_ranks_is_needed(tmp_path, ranks):
    with pytest.raises(ConfigError, match="number of ranks must be"):
        mpisim.run(make_config(tmp_path), ranks=ranks, transport="local")
    assert not (tmp_path / "runs").exists()


def test_a_transport_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match='transport must be "mpi" or "local"; got \'tcp\''):
        mpisim.run(make_config(tmp_path), ranks=1, transport="tcp")


def test_one_rank_needs_no_messages(tmp_path):
    result = mpisim.run(make_config(tmp_path), ranks=1, transport="local")
    assert result.summary["bytes_matrix"] == [[0]]


def test_no_thread_is_left(tmp_path):
    import threading

    before = threading.active_count()
    mpisim.run(make_config(tmp_path), ranks=4, transport="local")
    assert threading.active_count() == before
