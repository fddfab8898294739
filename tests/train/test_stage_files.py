"""Stage files: any split gives the whole back, a stage reads its own bytes, no fault passes."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpisim.errors import CheckpointError, ConfigError
from mpisim.layouts.specs import ParamSpec
from mpisim.memory.tracker import hook_is_built, open_tracker
from mpisim.nn.decoder import TABLE_NAME, build_decoder
from mpisim.nn.params import init_params
from mpisim.nn.precision import dtype_of
from mpisim.train.sample import last_logits
from mpisim.train.stage_files import (
    MANIFEST_FILE,
    MAX_HEADER_BYTES,
    WEIGHTS_FOLDER,
    StageRecord,
    aliases_of,
    save_manifest,
    save_stage,
    stage_file,
)
from mpisim.train.stage_reader import (
    StageReader,
    load_run_weights,
    load_stage,
    open_weights,
    weights_rows,
    weights_text,
    write_whole,
)
from mpisim.train.weights import WEIGHTS_FILE, load_weights, save_weights

ROOT = Path(__file__).parents[2]
HEAD_NAME = "head.output.weight"
FACTS = {"run": "r", "committed_steps": "7"}


def decoder(num_blocks=3, **sizes):
    return build_decoder(
        **{"vocab_size": 266, "d_model": 4, "num_heads": 1, "d_ff": 8, "max_len": 4} | sizes,
        num_blocks=num_blocks,
    )


MODEL = decoder()
SPECS = MODEL.param_specs()
SHAPES = {spec.name: spec.shape for spec in SPECS}


def stages_of(model, num_stages):
    """Return the blocks of each stage, contiguous."""
    bounds = [len(model.blocks) * stage // num_stages for stage in range(num_stages + 1)]
    return [model.blocks[lo:hi] for lo, hi in zip(bounds, bounds[1:], strict=False)]


def owned(blocks):
    return [spec for block in blocks for spec in SPECS if spec.name.startswith(block.name + ".")]


def used(blocks):
    """Return what a stage computes with: a tied table also where it is borrowed."""
    names = dict.fromkeys(full for block in blocks for full in block.full_names.values())
    return [spec for spec in SPECS if spec.name in names]


def weights_of(model=MODEL, dtype="float32", seed=1):
    return init_params(model, seed, dtype)


def save_parts(folder, num_stages, params, model=MODEL):
    records = []
    for stage, blocks in enumerate(stages_of(model, num_stages)):
        own = {
            name: array for name, array in params.items()
            if name.partition(".")[0] in {block.name for block in blocks}
        }  # fmt: skip
        records.append(
            save_stage(
                folder, stage, own, FACTS,
                specs=model.param_specs(), blocks=[block.name for block in blocks],
            )
        )  # fmt: skip
    return records


def save_split(folder, num_stages, params=None, model=MODEL):
    params = weights_of(model) if params is None else params
    records = save_parts(folder, num_stages, params, model)
    texts = [record.to_json() for record in records]
    save_manifest(folder, texts[::-1], aliases=aliases_of(model), metadata=FACTS)
    return params


@pytest.fixture
def folder(tmp_path):
    save_split(tmp_path / WEIGHTS_FOLDER, 3)
    return tmp_path / WEIGHTS_FOLDER


def equal_bits(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes(), name


def refused(call, *arguments, kind=CheckpointError, **options):
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    text = str(caught.value)
    assert " must " in text and "; got " in text and text.endswith(".") and text.isprintable(), text
    return text


# -- the whole from any split ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_any_split_gives_the_whole_model_back(tmp_path, num_stages, dtype):
    """P9: the same bits, and so the same outputs."""
    params = weights_of(dtype=dtype)
    params["head.norm.weight"][:] = [np.nan, -0.0, np.inf, np.finfo(dtype).tiny / 4]
    save_split(tmp_path / WEIGHTS_FOLDER, num_stages, params)
    loaded, metadata = load_run_weights(tmp_path, SPECS, dtype)
    equal_bits(loaded, params)
    assert metadata == FACTS
    params["head.norm.weight"][:] = loaded["head.norm.weight"][:] = 1.0
    ids = np.array([[3, 200, 1]], np.int32)
    logits = [last_logits(MODEL, MODEL.split_params(p), ids) for p in (params, loaded)]
    assert logits[0].tobytes() == logits[1].tobytes()
    for array in loaded.values():
        array[...] = 0  # the caller's own


@pytest.mark.parametrize("dtype", [None, "float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("written", "read"), [(1, 3), (3, 1), (3, 3), (5, 2), (2, 5)])
def test_a_stage_of_any_split_reads_its_own_bytes(tmp_path, written, read, dtype):
    """P9: whatever split wrote them, and whatever it converts to, as a full load has them."""
    params = save_split(tmp_path, written)
    for blocks in stages_of(MODEL, read):
        specs = used(blocks)
        with open_weights(tmp_path) as reader:
            assert reader.bytes_read == 0
            loaded = reader.load(specs, dtype)
            assert reader.bytes_read == sum(4 * spec.size for spec in specs)
        full = load_stage(tmp_path, SPECS, dtype)
        target = dtype_of(dtype or "float32")
        equal_bits(loaded, {spec.name: full[spec.name] for spec in specs})
        equal_bits(loaded, {spec.name: params[spec.name].astype(target) for spec in specs})


def test_a_stage_opens_no_file_but_its_own(folder):
    blocks = stages_of(MODEL, 3)[1]
    for stage in (0, 2):
        (folder / stage_file(stage)).unlink()
    assert load_stage(folder, owned(blocks)).keys() == {spec.name for spec in owned(blocks)}


@pytest.mark.parametrize("stored", ["float32", "float64"])
@pytest.mark.parametrize("target", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scratch_bytes", [16, 100, 1 << 12])
def test_tiles_of_any_size_convert_alike(tmp_path, stored, target, scratch_bytes):
    """16-bit numbers are the rounded float32 ones, as fresh weights are."""
    rng = np.random.default_rng(0)
    array = rng.standard_normal((7, 31)).astype(stored)
    # Between two float16 (bfloat16) numbers; float32 rounds it to the middle and then to even.
    array[0, :2] = [1 + 2**-11 + 2**-40, 1 + 2**-8 + 2**-40]
    array[1, :4] = [np.nan, np.inf, -0.0, 1e-40]
    specs = [ParamSpec(name="a.weight", shape=(7, 31))]
    save_manifest(tmp_path, [save_stage(tmp_path, 0, {"a.weight": array}, specs=specs)])
    expected = array if target == "float64" else array.astype(np.float32)
    expected = expected.astype(dtype_of(target))
    with StageReader(tmp_path, np.empty(scratch_bytes, np.uint8)) as reader:
        equal_bits(reader.load(specs, target), {"a.weight": expected})
        assert reader.bytes_read == array.nbytes


@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_any_range_of_a_parameter_can_be_read(folder, target):
    """As the engine fills shards: a range of each parameter that lies in them."""
    whole = load_stage(folder, SPECS, target)
    rng = np.random.default_rng(1)
    with StageReader(folder, np.empty(64, np.uint8)) as reader:
        total = 0
        for spec in SPECS:
            size = spec.size
            some = sorted(rng.integers(0, size + 1, 2))
            for lo, hi in ((0, 0), (size, size), (0, size), (size - 1, size), some):
                flat = np.full(spec.size + 2, 7, dtype_of(target))
                reader.fill(spec.name, flat[1 : 1 + hi - lo], int(lo))
                expected = whole[spec.name].reshape(-1)[lo:hi]
                assert flat[1 : 1 + hi - lo].tobytes() == expected.tobytes()
                assert flat[0] == 7 and (flat[1 + hi - lo :] == 7).all()
                total += 4 * (hi - lo)
        assert reader.bytes_read == total
        every_second = np.zeros(8, np.float32)
        reader.fill(TABLE_NAME, every_second[::2], 3)
        table = load_stage(folder, SPECS)[TABLE_NAME].reshape(-1)
        assert np.array_equal(every_second[::2], table[3:7]) and not every_second[1::2].any()


@pytest.mark.parametrize(("lo", "count"), [(-1, 1), (0, 5), (4, 1), (5, 0)])
def test_a_range_beyond_the_parameter_is_refused(folder, lo, count):
    with (
        StageReader(folder) as reader,
        pytest.raises(ValueError, match="within the 4 of head.norm"),
    ):
        reader.fill("head.norm.weight", np.empty(count, np.float32), lo)
    with StageReader(folder) as reader, pytest.raises(ValueError, match="flat array"):
        reader.fill("head.norm.weight", np.empty((2, 2), np.float32))


@pytest.mark.skipif(not hook_is_built(), reason="the allocator hook is not built")
@pytest.mark.parametrize("target", ["float64", "float32", "bfloat16", "float16"])
def test_with_scratch_of_the_caller_no_array_is_made(folder, target):
    """But for one number: a cast to bfloat16 makes some bytes on the way."""
    out = np.empty(1000, dtype_of(target))
    with StageReader(folder, np.empty(256, np.uint8)) as reader:
        reader.fill(TABLE_NAME, out[:1])
        tracker = open_tracker("hook")
        try:
            before = tracker.live()
            tracker.reset_peak()
            reader.fill(TABLE_NAME, out, 13)
            assert tracker.peak() - before <= (8 if target == "bfloat16" else 0)
        finally:
            tracker.close()


def test_numbers_beyond_float16_are_no_infinities(tmp_path):
    params = weights_of()
    params[TABLE_NAME][3, 1] = -7e4
    save_split(tmp_path, 2, params)
    text = refused(load_stage, tmp_path, SPECS, "float16")
    assert TABLE_NAME in text and "range of float16" in text
    assert load_stage(tmp_path, SPECS, "bfloat16")[TABLE_NAME][3, 1] == dtype_of("bfloat16").type(
        -7e4
    )


def test_only_known_dtypes_are_converted_to(folder):
    for dtype in ("int8", "float", np.int32):
        with pytest.raises(ValueError, match="dtype must be float32"):
            load_stage(folder, SPECS, dtype)
    equal_bits(
        load_stage(folder, SPECS, np.float64), load_stage(folder, SPECS, np.dtype("float64"))
    )


# -- a table with two users ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_tied_table_is_stored_once_and_loaded_once(tmp_path, dtype):
    """C127: one copy in the files, one buffer for both users."""
    params = save_split(tmp_path, 3)
    rows = weights_rows(open_closed(tmp_path))
    assert sum(row["bytes"] for row in rows) == sum(array.nbytes for array in params.values())
    assert [row["aliases"] for row in rows] == [{HEAD_NAME: TABLE_NAME}, {}, {}]
    both = [ParamSpec(name=name, shape=SHAPES[TABLE_NAME]) for name in (HEAD_NAME, TABLE_NAME)]
    with open_weights(tmp_path) as reader:
        loaded = reader.load(both, dtype)
        assert reader.bytes_read == params[TABLE_NAME].nbytes
    assert loaded[HEAD_NAME] is loaded[TABLE_NAME]
    loaded[HEAD_NAME][2, 1] = 5.0
    assert loaded[TABLE_NAME][2, 1] == 5.0
    # The last stage, which does not own it, by either name.
    for spec in both:
        (alone,) = load_stage(tmp_path, [spec]).values()
        assert np.array_equal(alone, params[TABLE_NAME])


def open_closed(folder):
    reader = open_weights(folder)
    reader.close()
    return reader


def test_an_untied_head_is_a_parameter_of_its_own(tmp_path):
    model = decoder(tied=False)
    assert aliases_of(model) == {} and aliases_of(MODEL) == {HEAD_NAME: TABLE_NAME}
    params = save_split(tmp_path, 3, model=model)
    loaded = load_stage(tmp_path, model.param_specs())
    equal_bits(loaded, params)
    assert loaded[HEAD_NAME] is not loaded[TABLE_NAME]


# -- what a load costs -----------------------------------------------------------------------------

MEASURED = """
import sys
import numpy as np
from mpisim.layouts.specs import ParamSpec
from mpisim.memory.tracker import peak_resident_bytes, reset_peak_resident, resident_bytes
from mpisim.train.stage_reader import open_weights

def taken():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])

folder, dtype = sys.argv[1], sys.argv[2]
specs = [ParamSpec(name=f"block1.w{n}", shape=(2048, 1024)) for n in range(2)]
with open_weights(folder) as reader:
    reader.load([ParamSpec(name="block1.b", shape=(4,))], dtype)  # what it imports and opens
first = reader.bytes_read
before = taken()
assert reset_peak_resident()
start = resident_bytes()
with open_weights(folder) as reader:
    made = reader.load(specs, dtype)
    print(peak_resident_bytes() - start, sum(a.nbytes for a in made.values()), reader.bytes_read,
          taken() - before - reader.header_bytes_read, first)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Four stages of 16 MiB each."""
    folder = tmp_path_factory.mktemp("large")
    specs = [
        ParamSpec(name=f"block{stage}.{name}", shape=shape)
        for stage in range(4)
        for name, shape in [*((f"w{n}", (2048, 1024)) for n in range(2)), ("b", (4,))]
    ]
    records = []
    for stage in range(4):
        own = {
            spec.name: np.ones(spec.shape, np.float32)
            for spec in specs if spec.name.startswith(f"block{stage}.")
        }  # fmt: skip
        records.append(save_stage(folder, stage, own, specs=specs))
    save_manifest(folder, records)
    with open_weights(folder) as reader:
        write_whole(reader, folder.parent / "whole.safetensors")
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("source", ["stages", "whole"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_stage_costs_its_own_bytes(large, dtype, source):
    """P9: by the system's own figures, of memory and of bytes read, in a fresh process."""
    where = large if source == "stages" else large.parent / "whole.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(where), dtype],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if "clear_refs" in done.stderr or "/proc/self/io" in done.stderr:
        pytest.skip("this system does not tell")
    assert done.returncode == 0, done.stderr
    peak, made, counted, taken, first = map(int, done.stdout.split())
    mib = 1 << 20
    assert first == 16 and counted == 16 * mib
    assert made == 4 * mib * dtype_of(dtype).itemsize
    # Reading /proc itself is a few thousand bytes.
    assert 0 <= taken - counted < 1 << 15
    # Some may lie in memory that the imports have freed; one parameter beside itself is 8 MiB more.
    assert made - 4 * mib < peak < made + 4 * mib, (peak / mib, made / mib)


# -- writing ---------------------------------------------------------------------------------------


class Killed(BaseException):
    """Ends the process, as far as the code can tell."""


CALLS = ["fsync", "replace", "unlink"]


def cut_at(patch, number):
    """Let the process end at a call to the file system; return the list of calls made."""
    made = []

    def watch(name, real):
        def call(*arguments, **options):
            if len(made) == number:
                raise Killed
            made.append(name)
            return real(*arguments, **options)

        return call

    patch.setattr(os, "fsync", watch("fsync", os.fsync))
    for name in ("replace", "unlink"):
        patch.setattr(Path, name, watch(name, getattr(Path, name)))
    return made


@pytest.mark.parametrize("before", [None, 2, 5])
def test_a_reader_sees_the_old_set_the_new_one_or_none(tmp_path, monkeypatch, before):
    """Whatever call the writers die at."""
    new, old = weights_of(seed=2), weights_of(seed=1)
    seen = []
    for number in range(1000):
        folder = tmp_path / str(number)
        if before:
            save_split(folder, before, old)
        with monkeypatch.context() as patch:
            made = cut_at(patch, number)
            try:
                save_split(folder, 3, new)
                is_done = True
            except Killed:
                is_done = False
        try:
            loaded = load_stage(folder, SPECS, verify=True)
        except CheckpointError as error:
            assert "must hold the weights of a finished run" in str(error)
            seen.append("none")
        else:
            expected = new if np.array_equal(loaded[TABLE_NAME], new[TABLE_NAME]) else old
            equal_bits(loaded, expected)
            seen.append("new" if expected is new else "old")
        if is_done:
            break
        # The next run writes over what is left.
        save_split(folder, 3, new)
        equal_bits(load_stage(folder, SPECS, verify=True), new)
    assert len(made) == number > 10
    order = list(dict.fromkeys(seen))
    assert order == (["old", "none", "new"] if before else ["none", "new"])
    # Of the earlier run with more stages nothing is left.
    assert sorted(os.listdir(folder)) == [MANIFEST_FILE, *(stage_file(stage) for stage in range(3))]


def test_bytes_reach_the_disk_before_their_names_and_the_manifest_comes_last(tmp_path, monkeypatch):
    events = []

    def watch(name, real):
        def call(*arguments):
            where = arguments[-1] if name == "replace" else ""
            events.append(f"{name} {Path(where).name}" if name == "replace" else name)
            return real(*arguments)

        return call

    monkeypatch.setattr(os, "fsync", watch("fsync", os.fsync))
    monkeypatch.setattr(Path, "replace", watch("replace", Path.replace))
    save_split(tmp_path, 2)
    assert events == [
        "fsync", "fsync",  # the two files
        "fsync",  # the folder, without the old manifest
        "replace stage-00.safetensors", "replace stage-01.safetensors", "fsync",
        "fsync", "replace manifest.json", "fsync",
    ]  # fmt: skip


def test_a_set_that_is_replaced_under_a_reader_is_no_mixture(tmp_path):
    """Same model, same sizes: only the numbers differ."""
    old = save_split(tmp_path, 3, weights_of(seed=1))
    blocks = stages_of(MODEL, 3)
    with open_weights(tmp_path) as reader:
        first = reader.load(owned(blocks[0]))
        save_split(tmp_path, 3, weights_of(seed=2))
        assert "another data_sha256" in refused(reader.load, owned(blocks[1]))
        # What was open stays what it was.
        equal_bits(reader.load(owned(blocks[0])), first)
    assert np.array_equal(first[TABLE_NAME], old[TABLE_NAME])


def test_a_disk_that_is_full_keeps_the_old_set(folder, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    before = sorted(os.listdir(folder))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        assert "No space left on device" in refused(save_split, folder, 3, weights_of(seed=2))
    assert sorted(os.listdir(folder)) == before
    equal_bits(load_stage(folder, SPECS, verify=True), weights_of())


def test_equal_weights_give_equal_files(tmp_path):
    for name in ("one", "two"):
        save_split(tmp_path / name, 3)
    for name in os.listdir(tmp_path / "one"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_stage_file_is_a_safetensors_file_as_others_write_it(folder, tmp_path):
    from safetensors.numpy import load_file

    params = weights_of()
    for stage, blocks in enumerate(stages_of(MODEL, 3)):
        found = load_file(folder / stage_file(stage))
        equal_bits(
            dict(sorted(found.items())),
            {name: params[name] for name in sorted(spec.name for spec in owned(blocks))},
        )
        assert load_weights(folder / stage_file(stage))[1] == FACTS


def test_memory_order_does_not_matter(tmp_path):
    params = {name: np.asfortranarray(array) for name, array in weights_of().items()}
    save_split(tmp_path, 2, params)
    equal_bits(load_stage(tmp_path, SPECS), weights_of())


def test_what_is_not_the_models_is_not_saved(tmp_path):
    params = weights_of()
    for change, words in (
        ({"other.weight": np.zeros(3, np.float32)}, "a parameter of the model"),
        ({TABLE_NAME: params[TABLE_NAME].T}, "with its shape"),
        ({TABLE_NAME: params[TABLE_NAME].astype(np.float16)}, "float32 or float64; got float16"),
        ({TABLE_NAME: params[TABLE_NAME].astype(">f4")}, "float32 or float64; got >f4"),
    ):
        with pytest.raises(ValueError, match=words):
            save_stage(tmp_path, 0, change, specs=SPECS)
    with pytest.raises(ValueError, match="metadata must be texts"):
        save_stage(tmp_path, 0, params, {"step": 7}, specs=SPECS)
    with pytest.raises(ValueError, match="metadata must be texts"):
        save_manifest(tmp_path, [], metadata={"step": 7})
    assert os.listdir(tmp_path) == []


# -- stages that are no model ----------------------------------------------------------------------


def test_records_come_back_from_their_text(tmp_path):
    for record in save_parts(tmp_path, 3, weights_of()):
        assert StageRecord.from_json(record.to_json()) == record
        assert json.loads(record.to_json())["file"] == record.file


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", "[" * 100_000, '{"stage": 0, "stage": 1}']
)
def test_a_text_that_is_no_record(text):
    assert "stage-record" in refused(StageRecord.from_json, text)


def twice(folder, records):
    """Two stages own the table: the last one saved its tied copy, too."""
    own = weights_of()
    names = [*records[2].params, TABLE_NAME]
    again = save_stage(folder, 2, {name: own[name] for name in names}, specs=SPECS)
    return [*records[:2], again]


def foreign(folder, records):
    """A stage of a model whose other blocks are wider."""
    model = decoder(num_blocks=4)
    own = {name: array for name, array in weights_of(model).items() if name.startswith("head.")}
    return [*records[:2], save_stage(folder, 2, own, specs=model.param_specs())]


def mixed(folder, records):
    own = weights_of(dtype="float64")
    again = save_stage(folder, 2, {name: own[name] for name in records[2].params}, specs=SPECS)
    return [*records[:2], again]


def incomplete(folder, records):
    own = weights_of()
    names = list(records[2].params)[1:]
    return [*records[:2], save_stage(folder, 2, {n: own[n] for n in names}, specs=SPECS)]


def without_file(folder, records):
    (folder / (stage_file(1) + ".part")).unlink()
    return records


def shortened(folder, records):
    path = folder / (stage_file(1) + ".part")
    path.write_bytes(path.read_bytes()[:-1])
    return records


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (twice, f"{TABLE_NAME} in stages 0 and 2"),
        (foreign, "2 different models"),
        (mixed, "2 dtypes"),
        (incomplete, "not those of the stages' model"),
        (without_file, "got no such file"),
        (shortened, "must hold the"),
        (lambda folder, records: records[:2], "not those of the stages' model"),
        (lambda folder, records: records[1:], "stages [1, 2] instead"),
        (lambda folder, records: [records[0], *records], "stages [0, 0, 1, 2] instead"),
        (lambda folder, records: [], "stages [] instead"),
    ],
)  # fmt: skip
def test_stages_that_are_no_whole_model_do_not_replace_one(folder, spoil, words):
    records = save_parts(folder, 3, weights_of(seed=2))
    records = spoil(folder, records)
    assert words in refused(save_manifest, folder, records, aliases=aliases_of(MODEL))
    equal_bits(load_stage(folder, SPECS, verify=True), weights_of())


# -- files that cannot be used ---------------------------------------------------------------------


def test_missing_weights_say_what_to_do(tmp_path):
    assert f"neither {WEIGHTS_FILE} nor" in refused(open_weights, tmp_path)
    assert "no such file" in refused(load_run_weights, tmp_path, SPECS)
    save_split(tmp_path / WEIGHTS_FOLDER, 3)
    (tmp_path / WEIGHTS_FOLDER / MANIFEST_FILE).unlink()
    for call, *arguments in ((open_weights, tmp_path), (load_run_weights, tmp_path, SPECS)):
        assert "were not written to the end" in refused(call, *arguments)


def test_a_stage_file_that_is_missing_or_no_plain_file(folder):
    path = folder / stage_file(1)
    path.unlink()
    assert "stage-01.safetensors must hold" in refused(load_stage, folder, SPECS)
    os.mkfifo(path)  # opening it would wait for ever
    assert "no plain file" in refused(load_stage, folder, SPECS)


def test_a_stage_file_cut_anywhere_is_refused_before_anything_is_read(folder):
    path = folder / stage_file(2)
    data = path.read_bytes()
    for length in (0, 4, 8, 100, len(data) - 1, len(data) + 1):
        path.write_bytes((data + b"\0")[:length])
        with open_weights(folder) as reader:
            assert f"{length} bytes where" in refused(reader.load, SPECS)
            assert reader.bytes_read == 0


def test_one_changed_byte_is_found_by_whoever_reads_all(folder):
    path = folder / stage_file(1)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    load_stage(folder, SPECS)  # sizes and header agree
    for call, *arguments in (
        (load_run_weights, folder.parent, SPECS),
        (lambda: load_stage(folder, SPECS, verify=True),),
    ):
        text = refused(call, *arguments)
        assert "stage-01.safetensors" in text and "sha256" in text


def test_a_file_that_shrinks_while_it_is_read(folder):
    with open_weights(folder) as reader:
        reader.load(owned(stages_of(MODEL, 3)[1])[:1])
        os.truncate(folder / stage_file(1), 400)
        assert "cut while it was read" in refused(reader.load, owned(stages_of(MODEL, 3)[1]))


def test_a_stage_of_another_run_is_told_apart_unread(folder, tmp_path):
    """Same model and sizes; also with a manifest that was made to fit its size."""
    save_split(tmp_path / "other", 3, weights_of(seed=2))
    (folder / stage_file(1)).write_bytes((tmp_path / "other" / stage_file(1)).read_bytes())
    with open_weights(folder) as reader:
        assert "another data_sha256" in refused(reader.load, SPECS)
        assert reader.bytes_read == 0


def change_file(folder, stage, change):
    """Change a stage file's header so that its length stays."""
    path = folder / stage_file(stage)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    changed = change(header)
    header = header if changed is None else changed
    if not isinstance(header, bytes):
        header = json.dumps(header, separators=(",", ":")).encode()
    assert len(header) <= length
    path.write_bytes(data[:8] + header.ljust(length) + data[8 + length :])


def shape_of(shape):
    def change(header):
        header.pop("__metadata__")  # makes room
        header["block1.norm1.weight"]["shape"] = shape

    return change


def swap_names(header):
    one, two = "block1.norm1.weight", "block1.norm2.weight"
    header[one], header[two] = header[two], header[one]


def double_name(header):
    text = json.dumps(header, separators=(",", ":"))
    return text.replace("block1.norm1.weight", "block1.norm2.weight").encode()


def overlap(header):
    (entry,) = (e for n, e in header.items() if n == "block1.norm2.weight")
    entry["data_offsets"] = header["block1.norm1.weight"]["data_offsets"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swap_names, "another parameters than"),
        (double_name, "block1.norm2.weight twice"),
        (overlap, "at byte"),
        (lambda h: h["block1.norm1.weight"].update(dtype="F16"), "of dtype 'F16'"),
        (lambda h: h["block1.norm1.weight"].update(dtype="I8"), "of dtype 'I8'"),
        (lambda h: h["block1.norm1.weight"].update(shape=[5]), "with offsets"),
        (lambda h: h["block1.norm1.weight"].update(shape=[-4]), "with shape"),
        (lambda h: h["block1.norm1.weight"].update(shape=[4.0]), "with shape"),
        (shape_of([1 << 70]), "with shape"),
        (shape_of([1] * 40), "40 dimensions"),
        (lambda h: h["block1.norm1.weight"].update(data_offsets=[0]), "1 offsets"),
        (lambda h: {"__metadata__": {"a": 1}}, "no texts by name"),
        (lambda h: {}, "where its header says"),
        (lambda h: b"[]", "no JSON object"),
        (lambda h: b"{", "no JSON text"),
        (lambda h: b"[" * 800, "no JSON text"),
        (lambda h: b"\xff{}", "no JSON text"),
        (lambda h: h.pop("__metadata__") and None, "another model than"),
    ],
)  # fmt: skip
def test_a_header_that_does_not_agree_is_refused_before_anything_is_read(folder, change, words):
    change_file(folder, 1, change)
    with open_weights(folder) as reader:
        text = refused(reader.load, SPECS)
        assert "stage-01.safetensors" in text and words in text
        assert reader.bytes_read == 0


@pytest.mark.parametrize("length", [0, 1, MAX_HEADER_BYTES + 1, 1 << 40, 2**64 - 1])
def test_a_header_that_claims_to_be_huge_is_refused(folder, length):
    path = folder / stage_file(1)
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    assert f"a header of {length} bytes" in refused(load_stage, folder, SPECS)


# -- manifests that cannot be used -----------------------------------------------------------------


def change_manifest(folder, change):
    path = folder / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    changed = change(manifest)
    path.write_text(json.dumps(manifest if changed is None else changed))


def stage(number):
    return lambda manifest: manifest["stages"][number]


def param(name, number=1):
    return lambda manifest: manifest["stages"][number]["params"][name]


def put(where, **values):
    return lambda manifest: where(manifest).update(values)


def move(manifest):
    """Two parameters of a stage on the same bytes."""
    params = manifest["stages"][1]["params"]
    params["block1.norm1.weight"]["offsets"] = params["block1.norm2.weight"]["offsets"]


def claim(manifest):
    """Two stages say that they have a parameter; each is right about its own bytes."""
    one, two = (manifest["stages"][number]["params"] for number in (1, 2))
    one["head.norm.weight"] = one.pop("block1.norm1.weight")
    assert one["head.norm.weight"]["shape"] == two["head.norm.weight"]["shape"]


NORM = param("block1.norm1.weight")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *((put(stage(1), file=name), "file ") for name in (
            "../stage-01.safetensors", "/etc/passwd", "stage-1.safetensors",
            "a/stage-01.safetensors", "stage-00.safetensors", "", None, ["stage-01.safetensors"],
        )),
        (put(stage(1), stage=0, file="stage-00.safetensors"), "stages [0, 0, 2] instead"),
        (put(stage(1), stage=True), "stage number True"),
        (put(stage(1), bytes=-1), "-1 bytes"),
        (put(stage(1), bytes=100), "of 100 in"),
        (put(stage(1), bytes="1"), "'1' bytes"),
        (put(stage(1), sha256="ab"), "sha256 'ab'"),
        (put(stage(1), data_sha256="0" * 64), "another data_sha256"),
        (put(stage(1), model="0" * 64), "2 different models"),
        (put(stage(1), blocks="block1"), "blocks"),
        (put(stage(1), blocks=["embed"]), "embed in stages 0 and 1"),
        (put(stage(1), blocks=["\x1b[2J"]), "blocks"),
        (put(stage(1), params=[]), "params of"),
        (put(NORM, dtype="F16"), "of dtype 'F16'"),
        (put(NORM, dtype="F99"), "of dtype 'F99'"),
        (put(NORM, dtype=["F32"]), "of dtype ['F32']"),
        (put(NORM, shape=[2, 2]), "not those of the stages' model"),
        (put(NORM, shape=[1 << 40, 1 << 40]), "with offsets"),
        (put(NORM, shape=[True, 4]), "with shape"),
        (put(NORM, shape=None), "with shape None"),
        (put(NORM, offsets=[1 << 40, (1 << 40) + 16]), "ending at byte"),
        (put(NORM, offsets=[8, 4]), "with offsets"),
        (put(NORM, offsets=[-8, 8]), "with offsets"),
        (move, "overlapping"),
        (claim, "head.norm.weight in stages 1 and 2"),
        (lambda m: stage(1)(m)["params"].pop("block1.norm1.weight") and None, "not those of"),
        (lambda m: m["stages"].pop() and None, "not those of"),
        (lambda m: m.update(stages=[]), "stages [] instead"),
        (lambda m: m.update(stages={}), "no stages"),
        (lambda m: m.update(stages=[3]), "no JSON object"),
        (lambda m: m.update(model="0" * 64), "model"),
        (lambda m: m.update(dtype="F64"), "dtype 'F64' with stages of F32"),
        (lambda m: m.update(version=2), "version 2"),
        (lambda m: m.update(format="other"), "no format"),
        (lambda m: m.update(metadata={"a": 1}), "no texts by name"),
        (lambda m: m.pop("alias") and None, "no stages and alias"),
        (lambda m: m["alias"][HEAD_NAME].update(of="nothing"), "alias"),
        (lambda m: m["alias"][HEAD_NAME].update(file=stage_file(1)), "alias"),
        (lambda m: m["alias"].update({TABLE_NAME: m["alias"][HEAD_NAME]}), "alias"),
        (lambda m: [], "no format"),
    ],
)  # fmt: skip
def test_a_manifest_that_breaks_a_rule_is_one_sentence(folder, change, words):
    change_manifest(folder, change)
    text = refused(load_stage, folder, SPECS)
    assert words in text, text
    assert "manifest.json" in text


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"null", b"[" * 100_000, b"\xff\xfe", b'{"format": 1, "format": 2}',
        b"1" * 10_000,
    ],
    ids=lambda data: str(data[:6]),
)  # fmt: skip
def test_a_manifest_that_is_no_manifest(folder, data):
    (folder / MANIFEST_FILE).write_bytes(data)
    assert "manifest.json must be the list" in refused(load_stage, folder, SPECS)


def test_a_manifest_that_is_huge_is_not_read(folder):
    path = folder / MANIFEST_FILE
    path.write_bytes(path.read_bytes().ljust(MAX_HEADER_BYTES))
    load_stage(folder, SPECS)
    path.write_bytes(path.read_bytes() + b" ")
    assert f"{MAX_HEADER_BYTES + 1} bytes, more than" in refused(load_stage, folder, SPECS)


def test_a_manifest_with_a_flipped_bit_never_crashes_or_changes_a_weight(folder):
    path = folder / MANIFEST_FILE
    data = path.read_bytes()
    expected = weights_of()
    num_refused = 0
    for offset in range(0, len(data), 7):
        changed = bytearray(data)
        changed[offset] ^= 1 << (offset % 7)
        path.write_bytes(changed)
        try:
            loaded = load_stage(folder, SPECS)
        except CheckpointError as error:
            assert "\n" not in str(error)
            num_refused += 1
        else:
            equal_bits(loaded, expected)
    assert num_refused > len(data) / 7 / 4


# -- weights of another model ----------------------------------------------------------------------


def test_names_shapes_and_dtypes_are_those_of_the_model(folder):
    other = decoder(num_blocks=4).param_specs()
    wide = decoder(d_ff=16).param_specs()
    few = decoder(num_blocks=2).param_specs()
    for call in (load_stage, lambda where, specs: load_run_weights(where.parent, specs)):
        assert "no block3." in refused(call, folder, other)
        assert "must have shape" in refused(call, folder, wide)
    assert "but block2." not in refused(load_run_weights, folder.parent, few)
    assert load_stage(folder, few).keys() == {spec.name for spec in few}
    text = refused(load_run_weights, folder.parent, SPECS, "float64")
    assert "must be float64; got float32" in text
    with StageReader(folder) as reader:
        assert "must hold block9.a" in refused(reader.fill, "block9.a", np.empty(1))


# -- one file --------------------------------------------------------------------------------------


def test_a_run_in_one_file_is_read_alike(tmp_path):
    params = weights_of()
    save_weights(tmp_path / WEIGHTS_FILE, params, FACTS)
    for source in (tmp_path, tmp_path / WEIGHTS_FILE):
        equal_bits(load_stage(source, SPECS, verify=True), params)
        blocks = stages_of(MODEL, 3)[1]
        with open_weights(source) as reader:
            assert not reader.is_split and reader.metadata == FACTS
            equal_bits(
                reader.load(owned(blocks), "float64"),
                {s.name: params[s.name].astype("float64") for s in owned(blocks)},
            )
            assert reader.bytes_read == sum(4 * spec.size for spec in owned(blocks))
    equal_bits(load_run_weights(tmp_path, SPECS, "float32")[0], params)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_the_whole_file_is_byte_for_byte_that_of_an_unsplit_run(tmp_path, num_stages, dtype):
    params = save_split(tmp_path / WEIGHTS_FOLDER, num_stages, weights_of(dtype=dtype))
    save_weights(tmp_path / "expected", params, FACTS)
    with StageReader(tmp_path, np.empty(100, np.uint8)) as reader:
        write_whole(reader, tmp_path / "whole")
        assert reader.bytes_read == sum(array.nbytes for array in params.values())
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "expected").read_bytes()
    with StageReader(tmp_path / "whole") as reader:  # also over itself
        write_whole(reader, tmp_path / "whole", overwrite=True)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "expected").read_bytes()


def test_a_whole_file_replaces_nothing_unasked(folder, tmp_path):
    out = tmp_path / "whole"
    out.write_text("mine")
    with open_weights(folder) as reader:
        assert "which exists" in refused(write_whole, reader, out, kind=ConfigError)
        for name in (stage_file(0), "new"):
            text = refused(write_whole, reader, folder / name, overwrite=True, kind=ConfigError)
            assert "outside of the stage files' folder" in text
        missing = tmp_path / "missing" / "whole"
        assert "a folder that exists" in refused(write_whole, reader, missing, kind=ConfigError)
    assert out.read_text() == "mine"


def test_a_whole_file_is_not_made_of_damaged_stages(folder, tmp_path):
    path = folder / stage_file(1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 128
    path.write_bytes(data)
    with open_weights(folder) as reader:
        assert "sha256" in refused(write_whole, reader, tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == [WEIGHTS_FOLDER]


def test_the_table_says_what_is_where(folder):
    reader = open_closed(folder)
    rows = weights_rows(reader)
    assert [row["blocks"] for row in rows] == [
        [block.name for block in blocks] for blocks in stages_of(MODEL, 3)
    ]
    for row, blocks in zip(rows, stages_of(MODEL, 3), strict=True):
        assert row["parameters"] == len(owned(blocks))
        assert row["numbers"] == sum(spec.size for spec in owned(blocks)) == row["bytes"] / 4
        assert row["file_bytes"] == (folder / row["file"]).stat().st_size
    text = weights_text(reader)
    total = sum(math.prod(shape) for shape in SHAPES.values())
    assert f"{len(SHAPES)} parameters, {total} numbers, float32" in text
    assert f"{HEAD_NAME} is {TABLE_NAME}, stored once in {stage_file(0)}" in text
