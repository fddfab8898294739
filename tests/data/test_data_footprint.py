"""Every NumPy byte of the data sets, their batches and the sampler, by an allocator hook."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from mpisim.config.schema import RunConfig
from mpisim.data import footprint
from mpisim.data.load import load_data
from mpisim.data.sampler import Sampler, permute_indices
from mpisim.memory.tracker import hook_is_built, open_tracker

ORDER_10 = [2, 0, 4, 7, 3, 1, 9, 6, 8, 5]
ORDER_100000 = [27097, 68300, 84399, 2823, 53576]


@pytest.fixture(scope="module")
def hook():
    if not hook_is_built():
        pytest.skip("the allocator hook is not built")
    tracker = open_tracker("hook")
    # The first generator of a process leaves 16 bytes that no data set owns.
    np.random.Generator(np.random.Philox(np.random.SeedSequence(0)))
    # What other tests of the process left is not looked at again by every collection here.
    gc.collect()
    gc.freeze()
    yield tracker
    gc.unfreeze()
    tracker.close()


CONFIGS = {
    "stdlib-mlp": ({"kind": "stdlib", "max_bytes": 2_000_000, "window": 9}, "mlp"),
    "text-mlp": ({"kind": "text", "path": "a.txt", "window": 9}, "mlp"),
    "npy-mlp": ({"kind": "text", "path": "bytes.npy", "window": 9}, "mlp"),
    "stdlib-packed": ({"kind": "stdlib", "max_bytes": 2_000_000, "window": 9}, "decoder"),
    "text-padded": ({"kind": "text", "path": "a.txt", "window": 9, "layout": "padded"}, "decoder"),
    "text-packed": ({"kind": "text", "path": "a.txt", "window": 9}, "decoder"),
    "text-window-1": ({"kind": "text", "path": "a.txt", "window": 1}, "decoder"),
    "npy-packed": ({"kind": "text", "path": "ids.npy", "window": 9}, "decoder"),
    "npy-padded": ({"kind": "text", "path": "ids.npy", "window": 9, "layout": "padded"}, "decoder"),
    "regression": ({"kind": "regression", "num_rows": 333, "num_features": 3}, "mlp"),
    "regression-64": ({"kind": "regression", "num_rows": 333, "num_targets": 2}, "mlp"),
}


def make_config(name, folder):
    data, kind = CONFIGS[name]
    if "path" in data:
        words = b"one two three four five six seven eight nine ten".split()
        lines = [b" ".join(words[i % 7 : i % 10 + 1] + [b"%d" % i]) for i in range(150)]
        (folder / "a.txt").write_bytes(b"\n\n".join(lines))
        np.save(folder / "bytes.npy", np.arange(3000, dtype=np.int16) % 256)
        ids = np.arange(3000) % 250
        ids[::37] = 258
        np.save(folder / "ids.npy", ids.astype(np.uint16))
        data = {**data, "path": str(folder / data["path"])}
    dtype = "float64" if name.endswith("64") else "float32"
    return RunConfig.model_validate(
        {"data": data, "model": {"kind": kind, "dtype": dtype}, "train": {"global_batch": 8}}
    )


def measure(hook, call):
    """Return (result, its bytes, most new bytes during the call)."""
    gc.collect()
    before = hook.live()
    hook.reset_peak()
    result = call()
    gc.collect()
    return result, hook.live() - before, hook.peak() - before


@pytest.mark.parametrize("name", CONFIGS)
def test_a_loaded_data_set_is_its_nbytes(hook, tmp_path, name):
    config = make_config(name, tmp_path)
    data, alive, _ = measure(hook, lambda: load_data(config))
    assert alive == data.nbytes > 0
    indices = np.arange(8)
    for call in (
        data.baselines,
        data.record,
        lambda: data.count_bytes("train", indices),
        lambda: data.count_targets("train", indices),
    ):
        assert measure(hook, lambda call=call: call() and None)[1] == 0
    assert measure(hook, lambda: data.count_targets("train", indices))[2] == 0


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows", [1, 2, 8, 70])
def test_a_batch_is_its_arrays_and_nothing_more(hook, tmp_path, name, rows):
    config = make_config(name, tmp_path)
    data = load_data(config)
    length = data.window if config.model.kind == "decoder" else None
    for make, count in (
        (data.train_batch, data.num_train),
        (data.heldout_batch, data.num_heldout),
    ):
        for start in {0, max(0, count - rows)}:
            indices = np.arange(start, min(start + rows, count))
            if not indices.size:
                continue
            batch, alive, peak = measure(hook, lambda make=make, i=indices: make(i))
            rows_made = len(indices)
            assert alive == data.batch_bytes(rows_made, length)
            assert alive == footprint.batch_bytes(config, rows_made, length)
            assert alive == sum(array.nbytes for array in batch.arrays())
            assert peak == data.batch_peak_bytes(rows_made, length)
            assert all(array.base is None for array in batch.arrays())
            if config.data.kind != "regression":
                counting = measure(hook, lambda batch=batch: batch.num_targets)[2]
                assert counting == footprint.counting_bytes(rows_made, length)


@pytest.mark.parametrize("count", [1, 3, 100, 5000])
@pytest.mark.parametrize("rows", [1, 7, 1500])
def test_sampling(hook, count, rows):
    rows = min(rows, count)
    sampler = Sampler(count, rows, 3)
    for step in range(3):
        rows_now = sampler.num_rows(step)
        indices, alive, peak = measure(hook, lambda step=step: sampler.batch_indices(step))
        assert alive == footprint.sampling_bytes(rows_now) == indices.nbytes
        assert peak == footprint.sampling_peak_bytes(rows_now)


def test_the_order_of_rows_is_that_of_the_first_release():
    """Committed runs name their losses: another order would be another run."""
    assert permute_indices(np.arange(10), 10, 0, 0).tolist() == ORDER_10
    assert permute_indices(np.arange(0, 100_000, 20_001), 100_000, 7, 3).tolist() == ORDER_100000


def test_an_empty_split_costs_no_more_than_an_item(hook, tmp_path):
    """NumPy takes a byte or an item for an array without elements."""
    (tmp_path / "few.txt").write_bytes(b"one two three four five six\n\nseven eight nine\n")
    config = RunConfig.model_validate(
        {
            "data": {"kind": "text", "path": str(tmp_path / "few.txt"), "window": 4},
            "model": {"kind": "decoder"},
            "train": {"global_batch": 1},
        }
    )
    data, alive, _ = measure(hook, lambda: load_data(config))
    assert data.num_heldout == 0
    assert 0 <= alive - data.nbytes <= 8
