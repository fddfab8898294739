"""Files of users: the examples of experiments/extensions run as said, bad ones are refused."""

from __future__ import annotations

import math
import shutil
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from small_jobs import make_config, train

import mpisim
from mpisim.comm import codecs
from mpisim.config import load_config
from mpisim.cost.simulate import Link, simulate_schedule
from mpisim.errors import ConfigError, MpisimError
from mpisim.layouts import codecs as codec_layouts
from mpisim.layouts import steps
from mpisim.memory.tracker import hook_is_built, open_tracker
from mpisim.nn import models
from mpisim.nn.layers import LayerContext
from mpisim.plan import schedules
from mpisim.plan.check_pipeline import in_flight
from mpisim.train import extensions
from mpisim.train.extensions import load_extensions
from mpisim.train.setup import Setup, check

ROOT = Path(__file__).parents[2]
if (folder := str(ROOT / "tests" / "memory")) not in sys.path:
    sys.path.insert(0, folder)

from exactness import forecast_differences, op_differences, strict_ops  # noqa: E402

EXAMPLES = ROOT / "experiments" / "extensions"
CHAIN = ROOT / "experiments" / "bubble" / "chain.py"


@pytest.fixture(autouse=True)
def _forgotten():
    """Leave no name behind that a test has registered."""
    known = (
        schedules.SCHEDULES, codec_layouts._SPECS, codecs._user_codecs, steps._REGISTERED,
        models.ACTIVATIONS, extensions.MODELS, extensions._loaded,
    )  # fmt: skip
    before = [dict(names) for names in known]
    yield
    for names, kept in zip(known, before, strict=True):
        names.clear()
        names.update(kept)
    steps.all_reduce_table.cache_clear()


def example(name):
    """Return the settings that name an example's file."""
    return {"extensions": [str(EXAMPLES / f"{name}.py")]}


DEEP = {"hidden": [6, 6, 6, 6, 6], "dtype": "float32"}
USES = {
    "eager": {
        "parallel": {"pp": 3, "schedule": "eager-1f1b"}, "train": {"num_microbatches": 8},
    },
    "sign": {
        "parallel": {"pp": 3}, "train": {"num_microbatches": 4},
        "compression": {"activations": "sign", "grads": "sign", "error_feedback": True},
    },
    "all_to_all": {"comm": {"algorithm": "all-to-all"}},
    "squared": {
        "model": {"hidden": [6, 6], "activation": "squared-relu"},
        "optimizer": {"lr": 1e-4}, "train": {"num_microbatches": 2},
    },
}  # fmt: skip


def run(folder, uses, extension=None):
    sections = {"run": example(extension) if extension else {}, "model": dict(DEEP)}
    for name, section in uses.items():
        sections[name] = sections.get(name, {}) | section
    sections["memory"] = {"measure": "hook" if hook_is_built() else "off"}
    sections["train"] = {"steps": 3} | sections.get("train", {})
    return train(make_config(folder, **sections), 3)


@pytest.mark.parametrize("name", USES)
def test_bytes_and_memory_of_an_example_are_as_forecast(tmp_path, name):
    with strict_ops() as watches:
        trained = run(tmp_path, USES[name], name)
    assert all(math.isfinite(loss) for loss in trained.losses)
    assert len(set(trained.losses)) == len(trained.losses)
    for rank in trained.summary["ranks"]:
        moved = {key: counts for key, counts in rank["traffic"].items() if any(counts.values())}
        assert moved.items() <= rank["predicted_traffic"].items()
    if hook_is_built():
        assert forecast_differences(trained.summary) == []
        assert op_differences([watch.found() for watch in watches]) == []
        assert sum(watch.num_ops for watch in watches) > 0


@pytest.mark.parametrize("name", ["eager", "sign", "all_to_all", "squared"])
def test_the_config_beside_an_example_makes_a_plan(monkeypatch, name):
    monkeypatch.chdir(ROOT)
    config = load_config(EXAMPLES / f"{name}.toml")
    ranks = int(
        (EXAMPLES / f"{name}.toml").read_text(encoding="utf-8").split("--ranks ")[1].split()[0]
    )
    setup = Setup(config, ranks)
    assert setup.extensions.keys() == {f"experiments/extensions/{name}.py"}
    assert len(setup.full_plan().ranks) == ranks


# The schedule ---------------------------------------------------------------------------------


def test_the_schedule_is_short():
    lines = (EXAMPLES / "eager.py").read_text(encoding="utf-8").splitlines()
    assert 0 < len(lines) < 40


def test_eager_1f1b_gives_the_bits_of_1f1b(tmp_path):
    eager = run(tmp_path, USES["eager"], "eager")
    plain = run(tmp_path, {**USES["eager"], "parallel": {"pp": 3, "schedule": "1f1b"}})
    assert eager.losses == plain.losses
    for name, array in plain.params.items():
        np.testing.assert_array_equal(eager.params[name], array)


@pytest.mark.parametrize(("stages", "micros"), [(2, 8), (4, 8), (4, 17), (8, 32)])
def test_eager_1f1b_hides_latencies_up_to_half_of_a_microbatch(stages, micros):
    load_extensions(example("eager")["extensions"])
    forward, backward = 1, 2

    def step(schedule, latency):
        return simulate_schedule(
            schedule, stages, micros, forward_s=forward, backward_s=backward, link=Link(latency)
        ).step_s

    half = Fraction(forward + backward, 2)
    for latency in (0, Fraction(1, 3), 1, half):
        assert step("eager-1f1b", latency) == step("gpipe", latency)
    assert step("eager-1f1b", 2 * half) > step("gpipe", 2 * half)
    assert step("1f1b", half) > step("eager-1f1b", half)


def test_eager_1f1b_keeps_2n_minus_1_microbatches(tmp_path):
    setup = Setup(
        make_config(
            tmp_path, run=example("eager"), model=DEEP, parallel=USES["eager"]["parallel"],
            train={"num_microbatches": 4},
        ), 3,
    )  # fmt: skip
    plan = setup.full_plan()
    assert [in_flight(plan, rank) for rank in range(3)] == [4, 3, 1]


# The codec ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 11), (8191,), (8193,), (5, 4096), (0,)])
def test_signs_arrive_times_the_mean_magnitude(shape):
    load_extensions(example("sign")["extensions"])
    spec = codec_layouts.codec_spec("sign")
    x = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    x.reshape(-1)[:1] = -0.0
    nbytes = codec_layouts.payload_bytes(spec, shape, 4)
    assert nbytes == 4 + math.ceil(x.size / 8)
    payload = np.full(nbytes, 0xAA, np.uint8)
    scratch = np.full(codecs.SCRATCH_BYTES, 0x55, np.uint8)
    codecs.encode(spec, x, payload, scratch)
    signs = np.packbits(np.signbit(x).reshape(-1), bitorder="little")
    np.testing.assert_array_equal(payload[4:], signs)
    out = np.full(shape, np.nan, np.float32)
    codecs.decode(spec, payload, out, scratch)
    np.testing.assert_array_equal(np.signbit(out), np.signbit(x))
    mean = np.abs(x).mean(dtype=np.float64) if x.size else 0.0
    np.testing.assert_allclose(np.abs(out), mean, rtol=1e-6)
    assert len(set(np.abs(out).reshape(-1).tolist())) <= 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_signs_of_what_is_not_finite_are_not_finite(bad):
    load_extensions(example("sign")["extensions"])
    x = np.ones(9000, np.float32)
    x[8500] = bad
    assert not np.isfinite(codecs.roundtrip(codec_layouts.codec_spec("sign"), x)).any()


# The all-reduce -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 206])
def test_all_to_all_sends_what_a_ring_sends(size, count):
    load_extensions(example("all_to_all")["extensions"])
    ours = steps.all_reduce_table(count, size, 4, "all-to-all")
    ring = steps.all_reduce_table(count, size, 4, "ring")
    assert ours.algorithm == "all-to-all"
    total = sum(ours.sent_bytes(index, 4) for index in range(size))
    assert total == sum(ring.sent_bytes(index, 4) for index in range(size))
    for index in range(size):
        assert ours.sent_messages(index) == ours.received_messages(index) == 2 * (size - 1)


def test_all_to_all_adds_up_and_keeps_replicas_equal(tmp_path):
    ours = run(tmp_path, USES["all_to_all"], "all_to_all")
    ring = run(tmp_path, {"comm": {"algorithm": "ring"}})
    assert len(ours.digests) == 1
    np.testing.assert_allclose(ours.losses, ring.losses, rtol=1e-5)
    first = ours.summary["ranks"][0]["traffic"]["dp all_reduce"]
    assert first["sent_messages"] == 3 * 4


# The activation -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_squared_relu_and_its_gradient(dtype):
    load_extensions(example("squared")["extensions"])
    layer = models.ACTIVATIONS["squared-relu"]()
    x = np.array([[-2.0, -0.0, 0.5, 3.0]], dtype)
    dy = np.array([[7.0, 7.0, 2.0, -1.0]], dtype)
    y, saved = layer.forward({}, x, LayerContext())
    np.testing.assert_array_equal(y, np.array([[0, 0, 0.25, 9]], dtype))
    dx, kept = layer.backward_input({}, saved, dy, LayerContext())
    np.testing.assert_array_equal(dx, np.array([[0, 0, 2, -6]], dtype))
    assert (y.dtype, dx.dtype, kept) == (dtype, dtype, ())
    assert saved[0] is y
    spec = layer.spec(x.shape, np.dtype(dtype), "a")
    assert spec.saved_bytes == y.nbytes and spec.extra_saved_bytes == 0


@pytest.mark.skipif(not hook_is_built(), reason="the allocator hook was not compiled")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_squared_relu_makes_what_its_spec_says(dtype):
    load_extensions(example("squared")["extensions"])
    layer = models.ACTIVATIONS["squared-relu"]()
    x, dy = (np.full((5, 7), value, dtype) for value in (0.5, 2.0))
    spec = layer.spec(x.shape, x.dtype, "a")
    tracker = open_tracker("hook")
    try:
        before = tracker.live()
        tracker.reset_peak()
        _, saved = layer.forward({}, x, LayerContext())
        assert tracker.peak() - before == spec.forward_peak_bytes
        before = tracker.live()
        tracker.reset_peak()
        layer.backward_input({}, saved, dy, LayerContext())
        assert tracker.peak() - before == spec.input_peak_bytes
    finally:
        tracker.close()


# The chain of the experiments -----------------------------------------------------------------


def chain(folder, **sections):
    data = {"num_features": 8, "num_targets": 8}
    model = {"kind": "chain", "num_blocks": 4, "dtype": "float32"}
    return make_config(folder, data=data, model=model, run={"extensions": [str(CHAIN)]}, **sections)


def test_blocks_of_a_chain_cost_the_same(tmp_path):
    specs = Setup(chain(tmp_path), 1).specs(3)
    assert len(specs) == 4
    assert {s.layers[0].forward_flops for s in specs} == {2 * 3 * 64 + 24}
    assert {s.layers[0].weight_flops for s in specs} == {2 * 3 * 64 + 24}
    assert {s.layers[0].input_flops for s in specs} == {2 * 3 * 64}


def test_a_chain_trains_as_forecast(tmp_path):
    config = chain(
        tmp_path, parallel={"pp": 2, "schedule": "zb-h1"},
        train={"num_microbatches": 4, "steps": 2},
        memory={"measure": "hook" if hook_is_built() else "off"},
    )  # fmt: skip
    trained = train(config, 2)
    assert trained.losses[1] < trained.losses[0]
    assert forecast_differences(trained.summary) == []


# Bad files ------------------------------------------------------------------------------------

SCHEDULE = """
from mpisim.plan.ops import BackwardStage, ForwardStage
from mpisim.plan.schedules import register_schedule
def mine(num_stages, coordinate, num_microbatches, num_chunks):
    ops = []
    for micro in range(num_microbatches):
        ops += [ForwardStage(micro), BackwardStage(micro)]
    return {body}
register_schedule("mine", mine)
"""


def setup_of(folder, text, ranks=3, **sections):
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    return make_config(
        folder, run={"extensions": [str(path)]}, model=DEEP,
        **{"train": {"num_microbatches": 4}} | sections,
    ), ranks  # fmt: skip


PIPED = {"pp": 3, "schedule": "mine"}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("\nx = 1 / 0\n", r"ZeroDivisionError: division by zero in \S*mine.py at line 2"),
        ("import sys\nsys.exit(0)\n", r"SystemExit: 0 in \S*mine.py at line 2"),
        ("def broken(:\n", r"SyntaxError: .*mine.py"),
        (
            "from mpisim.plan.schedules import register_schedule\nregister_schedule('1f1b', len)",
            r"must not be a built-in one; got '1f1b'.*mine.py at line 2",
        ),
        (
            "from mpisim.train.extensions import register_model\nregister_model('mlp', len)",
            r"none of mlp, decoder.*mine.py at line 2",
        ),
        (
            "from mpisim.nn.models import register_activation\nregister_activation('relu', len)",
            r"got 'relu'.*mine.py at line 2",
        ),
        (
            "from mpisim.layouts.steps import register_all_reduce as r\nr('ring', len)",
            r"got 'ring'.*mine.py at line 2",
        ),
        (
            "from mpisim.comm.codecs import register_codec\n"
            "from mpisim.layouts.codecs import CodecSpec\n"
            "register_codec(CodecSpec('int4', 200, 'custom', size=len), len, len)",
            r"got 'int4'.*mine.py at line 3",
        ),
    ],
)
def test_a_file_that_fails_is_named_with_its_line(tmp_path, text, match):
    with pytest.raises(ConfigError, match=match):
        Setup(*setup_of(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
    config = make_config(tmp_path, run={"extensions": [str(tmp_path / "gone.py")]})
    with pytest.raises(ConfigError, match=r"must be Python files .*gone\.py\. Correct the path"):
        Setup(config, 1)


def test_a_schedule_that_forgets_a_backward_is_told_where(tmp_path):
    config, ranks = setup_of(tmp_path, SCHEDULE.format(body="ops[:-1]"), parallel=PIPED)
    with pytest.raises(ConfigError, match=r"backward of microbatch 3, chunk 0 .* 7 ops of rank 0"):
        check(config, ranks)


def test_a_schedule_that_waits_for_ever_is_told_who_for_whom(tmp_path):
    """The last stage wants all microbatches before it gives a gradient back."""
    text = SCHEDULE.format(body="ops if coordinate != 2 else [*ops[::2], *ops[1::2]]")
    config, ranks = setup_of(tmp_path, text, parallel=PIPED)
    with pytest.raises(ConfigError, match=r"rank 2"):
        check(config, ranks)


def test_a_changed_file_is_run_again(tmp_path):
    path = tmp_path / "mine.py"
    for body in ("ops", "[*ops[::2], *ops[1::2]]"):
        path.write_text(SCHEDULE.format(body=body), encoding="utf-8")
        load_extensions([str(path)])
        first = schedules.compute_lists("mine", 2, 2)[0]
        assert (first[1].micro == 1) == (body != "ops")


def test_a_name_that_nobody_registered_is_told_the_nearest(tmp_path):
    config = make_config(tmp_path, run=example("eager"), parallel={"pp": 2, "schedule": "eager-1f"})
    with pytest.raises(ConfigError, match=r"Did you mean eager-1f1b\?"):
        Setup(config, 2)


# What users' functions raise ------------------------------------------------------------------

CODEC = """
from mpisim.comm.codecs import register_codec
from mpisim.layouts.codecs import CodecSpec
def size(shape, itemsize):
    num = itemsize
    for extent in shape:
        num *= extent
    return {size}
def encode(x, payload, scratch):
    payload[:] = x.reshape(-1).view("u1")
    {encode}
def decode(payload, out, scratch):
    out.reshape(-1).view("u1")[:] = payload
    {decode}
register_codec(CodecSpec("mine", 200, "custom", size=size), {pair})
"""
WHOLE = {"size": "num", "encode": "pass", "decode": "pass", "pair": "encode, decode"}
MODEL = """
from mpisim.train.extensions import register_model
register_model("mine", {build})
"""
ACTIVATION = """
from mpisim.nn.models import register_activation
register_activation("mine", {make})
"""
ALL_REDUCE = """
from mpisim.layouts.steps import register_all_reduce
register_all_reduce("mine", {rows})
"""


def use(kind, **bodies):
    """Return a file's text and the sections that use what it registers."""
    if kind == "schedule":
        return SCHEDULE.format(**bodies), {"parallel": PIPED}
    if kind in ("activations", "grads"):
        uses = {"parallel": {"pp": 3}, "compression": {kind: "mine"}}
        return CODEC.format(**WHOLE | bodies), uses
    if kind == "model":
        return MODEL.format(**bodies), {"model": {"kind": "mine"}}
    if kind == "activation":
        return ACTIVATION.format(**bodies), {"model": DEEP | {"activation": "mine"}}
    return ALL_REDUCE.format(**bodies), {"comm": {"algorithm": "mine"}}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """Return the folder of a finished run; nobody changes it."""
    return train(make_config(tmp_path_factory.mktemp("earlier"), trace={"enabled": False}), 1).path


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*")) if path.is_file()
    }  # fmt: skip


def start_over(earlier, folder, kind, **bodies):
    """Run over a copy of an earlier run with a file of a user; returns the copy."""
    text, sections = use(kind, **bodies)
    target = shutil.copytree(earlier, folder / "runs" / "a")
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    sections = {"model": DEEP, "train": {"num_microbatches": 4, "steps": 1}} | sections
    config = make_config(folder, run={"name": "a", "extensions": [str(path)]}, **sections)
    mpisim.run(config, ranks=3, overwrite=True, transport="local")
    return target


REFUSED = [
    (
        "schedule", {"body": "ops if coordinate != 2 else [*ops[::2], *ops[1::2]]"},
        r"parallel.schedule = 'mine': ranks must not wait for each other for ever; [^$]*rank 2 op",
    ),
    (
        "schedule", {"body": "ops[:-1]"},
        r"parallel.schedule = 'mine': backward of microbatch 3, chunk 0 must run once; .* rank 0",
    ),
    (
        "schedule", {"body": "ops if coordinate < 2 else ops[coordinate:]"},
        r"parallel.schedule = 'mine': .* rank 2 of the pipeline",
    ),
    (
        "schedule", {"body": "ops if coordinate != 1 else 1 / 0"},
        r"schedule mine must return a list of ops; got ZeroDivisionError: division by zero for "
        r"rank 1 of 3 with 4 microbatches",
    ),
    ("schedule", {"body": "None"}, r"schedule mine must .*; got TypeError: .*NoneType.* rank 0"),
    ("schedule", {"body": "['F0']"}, r"schedule = 'mine': an op .* must be one of .*; got F0 as"),
    (
        "activations", {"pair": "None, decode"},
        r"encode of codec 'mine' must be a function; got None.*mine.py at line 15",
    ),
    (
        "grads", {"pair": "encode, 3"},
        r"decode of codec 'mine' must be a function; got 3.*mine.py at line 15",
    ),
    ("model", {"build": "3"}, r"builder of model 'mine' must be a function; got 3.*mine.py at"),
    ("model", {"build": "lambda config: None"}, r"model.kind = 'mine' must return a .*; got None"),
    (
        "model", {"build": "lambda config: 1 / 0"},
        r"builder of model.kind = 'mine' must return a Model; got ZeroDivisionError: division by",
    ),
    ("model", {"build": "lambda: None"}, r"'mine' must return a Model; got TypeError: .*argument"),
    ("activation", {"make": "None"}, r"maker of 'mine' must be a function; got None.*mine.py at"),
    ("all-reduce", {"rows": "3"}, r"rows of mine must be a function; got 3.*mine.py at line 3"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "bodies", "match"), REFUSED)
def test_what_a_function_gets_wrong_is_said_before_anything_is_replaced(
    tmp_path, earlier, kind, bodies, match
):
    with pytest.raises(ConfigError, match=match):
        start_over(earlier, tmp_path, kind, **bodies)
    assert tree(tmp_path / "runs" / "a") == tree(earlier)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]


@pytest.mark.parametrize("kind", ["activations", "grads"])
@pytest.mark.parametrize(
    ("bodies", "match"),
    [
        ({"encode": "[][1]"}, r"encode of codec 'mine' must .*; got IndexError: list index out"),
        ({"encode": "raise ValueError('odd')"}, r"encode of codec 'mine' must .*; got ValueError"),
        ({"decode": "[][1]"}, r"decode of codec 'mine' must .*; got IndexError: list index out"),
        ({"decode": "raise ValueError('odd')"}, r"codec 'mine' can decode; got odd"),
    ],
)
def test_a_codec_that_fails_is_named(tmp_path, earlier, kind, bodies, match):
    with pytest.raises(MpisimError, match=match):
        start_over(earlier, tmp_path, kind, **bodies)


@pytest.mark.parametrize("kind", ["activations", "grads"])
def test_the_codec_itself_is_a_good_one(tmp_path, earlier, kind):
    """What the bad ones are made from."""
    over = start_over(earlier, tmp_path, kind)
    assert tree(over) != tree(earlier)


BAD_SIZES = [
    ("-5", "-5"), ("2.5", "2.5"), ("None", "None"), ("1 / 0", "ZeroDivisionError"), ("True", ""),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["activations", "grads"])
@pytest.mark.parametrize(("size", "got"), BAD_SIZES)
def test_a_size_that_is_no_number_of_bytes_is_said_before_anything_is_replaced(
    tmp_path, earlier, kind, size, got
):
    with pytest.raises(ConfigError, match=rf"size function of codec 'mine' must .*; got {got}"):
        start_over(earlier, tmp_path, kind, size=size)
    assert tree(tmp_path / "runs" / "a") == tree(earlier)


@pytest.mark.parametrize("make", ["lambda: None", "lambda: 1 / 0", "lambda x: x", "object"])
def test_a_maker_that_makes_no_layer_is_named(tmp_path, earlier, make):
    with pytest.raises(ConfigError, match="'mine'"):
        start_over(earlier, tmp_path, "activation", make=make)
    assert tree(tmp_path / "runs" / "a") == tree(earlier)


ROWS = ["lambda *_: None", "lambda *_: 1 / 0", "lambda: []"]


@pytest.mark.parametrize("rows", ROWS)
def test_rows_that_are_none_are_said_before_anything_is_replaced(tmp_path, earlier, rows):
    with pytest.raises(ConfigError, match="mine"):
        start_over(earlier, tmp_path, "all-reduce", rows=rows)
    assert tree(tmp_path / "runs" / "a") == tree(earlier)


@pytest.mark.parametrize("body", ["[ForwardStage('0')]", "[ForwardStage(0, None)]"])
def test_ops_without_numbers_are_refused(tmp_path, earlier, body):
    with pytest.raises(ConfigError, match="rank 0 of the pipeline"):
        start_over(earlier, tmp_path, "schedule", body=body)
    assert tree(tmp_path / "runs" / "a") == tree(earlier)
