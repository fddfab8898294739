"""Settings that do nothing are named, one sentence each; those that do something are not."""

import doctest
from pathlib import Path

import pytest

from mpisim.cli import main
from mpisim.config import RunConfig, config_from_mapping, dump_config, effects, load_config
from mpisim.config.effects import settings_without_effect

SHIPPED = sorted((Path(__file__).parents[2] / "experiments").glob("*/*.toml"))
TEXT = {"kind": "text", "path": "a.txt"}

# -- one case per rule: what is set, and what is said about it; said as (field, value, cause) -----

DECODER_FIELDS = {
    "d_model": 32, "num_blocks": 2, "num_heads": 2, "num_kv_heads": 1, "d_ff": 24, "tied": False,
    "vocab_size": 300, "max_len": 9, "rope_theta": 100.0, "norm_eps": 1e-6, "dropout": 0.5,
    "loss_chunk_tokens": 7,
}  # fmt: skip
DYNAMIC_FIELDS = {
    "growth_interval": 5, "growth_factor": 4.0, "backoff_factor": 0.25, "min_scale": 2.0,
}  # fmt: skip
MLP, DECODER = "model.kind = mlp", "model.kind = decoder"


def cases():
    """Yield (sections, field, value, cause)."""
    for name, value in DECODER_FIELDS.items():
        yield {"model": {name: value}}, f"model.{name}", value, MLP
    yield {"data": {"layout": "padded"}}, "data.layout", "padded", MLP
    for name, value in (("hidden", [3]), ("activation", "tanh"), ("embed_dim", 5)):
        shown = (3,) if name == "hidden" else value
        yield {"model": {"kind": "decoder", name: value}}, f"model.{name}", shown, DECODER
    rows = {"kind": "regression"}
    for name, value in (("window", 9), ("max_bytes", 99)):
        yield {"data": rows | {name: value}}, f"data.{name}", value, "data.kind = regression"
    yield (
        {"data": rows, "model": {"embed_dim": 5}}, "model.embed_dim", 5, "data.kind = regression",
    )  # fmt: skip
    for name, value in (
        ("num_rows", 99), ("num_features", 3), ("num_targets", 2), ("noise", 0.5),
    ):  # fmt: skip
        yield {"data": {name: value}}, f"data.{name}", value, "data.kind = stdlib"
        yield {"data": TEXT | {name: value}}, f"data.{name}", value, "data.kind = text"
    yield {"optimizer": {"momentum": 0.5}}, "optimizer.momentum", 0.5, "optimizer.kind = adamw"
    for name, value in (("beta1", 0.5), ("beta2", 0.5), ("eps", 1e-6)):
        settings = {"kind": "sgd", name: value}
        yield {"optimizer": settings}, f"optimizer.{name}", value, "optimizer.kind = sgd"
    yield (
        {"optimizer": {"min_lr_ratio": 0.5}}, "optimizer.min_lr_ratio", 0.5,
        "optimizer.schedule = constant",
    )  # fmt: skip
    for name, value in {"init_scale": 8.0, **DYNAMIC_FIELDS}.items():
        for scale in ("auto", "none", "static"):
            if (name, scale) != ("init_scale", "static"):
                yield (
                    {"precision": {"loss_scale": scale, name: value}}, f"precision.{name}", value,
                    f"precision.loss_scale = {scale}",
                )  # fmt: skip
    for mode in ("none", "selective"):
        settings = {"recompute": mode, "recompute_every": 3}
        decoder = {"kind": "decoder"}
        yield {
            "memory": settings, "model": decoder,
        }, "memory.recompute_every", 3, f"memory.recompute = {mode}"  # fmt: skip
    yield (
        {"memory": {"recompute": "selective"}},
        "memory.recompute",
        "selective",
        "model.kind = mlp",
    )


CASES = list(cases())


@pytest.mark.parametrize(
    ("sections", "field", "value", "cause"), CASES, ids=[f"{c[1]} {c[3]}" for c in CASES]
)
def test_what_does_nothing_is_said_with_its_value_and_its_cause(sections, field, value, cause):
    sentence = f"{field} = {value} has no effect with {cause}."
    assert settings_without_effect(config_from_mapping(sections)) == [sentence]


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"kind": "decoder", **DECODER_FIELDS}, "data": {"layout": "padded", "window": 9}},
        {"model": {"hidden": [3], "activation": "tanh", "embed_dim": 5}, "data": {"window": 9}},
        {"model": {"hidden": [3]}, "data": {"max_bytes": 9} | TEXT},
        {
            "data": {
                "kind": "regression", "num_rows": 9, "num_features": 3, "num_targets": 2,
                "noise": 0.5,
            },
            "model": {"hidden": [3], "activation": "tanh"},
        },
        {"optimizer": {"kind": "sgd", "momentum": 0.0, "schedule": "cosine", "min_lr_ratio": 0.0}},
        {"optimizer": {"beta1": 0.5, "beta2": 0.5, "eps": 1e-6, "weight_decay": 0.1}},
        {"optimizer": {"schedule": "linear", "min_lr_ratio": 0.0, "kind": "sgd"}},
        {"precision": {"loss_scale": "dynamic", "init_scale": 8.0, **DYNAMIC_FIELDS}},
        {"precision": {"loss_scale": "static", "init_scale": 8.0}},
        {"precision": {"compute": "float16", "init_scale": 8.0, **DYNAMIC_FIELDS}},
        {"precision": {"reduce": "float16", "init_scale": 8.0, **DYNAMIC_FIELDS}},
        {"precision": {"wire": "float16", "init_scale": 8.0, **DYNAMIC_FIELDS}},
        {"memory": {"recompute": "full", "recompute_every": 3}},
        {"train": {"steps": 3}, "parallel": {"bucket_bytes": 9}, "comm": {"algorithm": "ring"}},
    ],
)  # fmt: skip
def test_what_does_something_is_not_named(sections):
    assert settings_without_effect(config_from_mapping(sections)) == []


def test_bfloat16_needs_no_scale():
    config = config_from_mapping({"precision": {"compute": "bfloat16", "init_scale": 8.0}})
    assert settings_without_effect(config) == [
        "precision.init_scale = 8.0 has no effect with precision.loss_scale = auto."
    ]


def test_every_setting_that_does_nothing_has_a_sentence():
    """In the order of the rules; a value that is the default says nothing."""
    sections = {
        "model": {"tied": False, "norm_eps": 1e-5},
        "data": {"noise": 0.5, "num_rows": 4096},
        "memory": {"recompute_every": 2},
    }
    said = settings_without_effect(config_from_mapping(sections))
    assert [sentence.split(" ")[0] for sentence in said] == [
        "model.tied", "data.noise", "memory.recompute_every",
    ]  # fmt: skip


def test_the_default_config_has_nothing_to_say():
    assert settings_without_effect(RunConfig()) == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_have_nothing_to_say(path):
    assert settings_without_effect(load_config(path)) == []


def test_there_are_shipped_configs():
    assert len(SHIPPED) >= 6


# -- where it is said -----------------------------------------------------------------------------

QUIET = {
    "data": {"kind": "regression", "num_rows": 60}, "model": {"hidden": [3]},
    "optimizer": {"kind": "sgd"}, "train": {"steps": 1, "global_batch": 6},
}  # fmt: skip
LOUD = QUIET | {"memory": {"recompute_every": 4}, "optimizer": {"kind": "sgd", "eps": 1e-6}}
NOTES = [
    "note: optimizer.eps = 1e-06 has no effect with optimizer.kind = sgd.",
    "note: memory.recompute_every = 4 has no effect with memory.recompute = none.",
]


@pytest.mark.parametrize(("sections", "notes"), [(QUIET, []), (LOUD, NOTES)])
def test_check_says_it(tmp_path, capsys, sections, notes):
    path = tmp_path / "run.toml"
    path.write_text(dump_config(config_from_mapping(sections)), encoding="utf-8")
    assert main(["check", str(path), "--ranks", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("note")] == notes
    # Behind the verdict, before the table.
    place = lines.index("ok: order, matching, deadlock, leaks")
    assert lines[place + 1 : place + 1 + len(notes) + 1] == [*notes, ""]


@pytest.mark.parametrize(("sections", "notes"), [(QUIET, []), (LOUD, NOTES)])
def test_a_run_says_it_before_its_first_step(tmp_path, capsys, sections, notes):
    import mpisim

    config = sections | {"run": {"dir": str(tmp_path)}}
    mpisim.run(config, ranks=2, transport="local")
    lines = "".join(capsys.readouterr()).splitlines()
    assert [line for line in lines if line.startswith("note")] == notes
    table = next(place for place, line in enumerate(lines) if line.split()[:1] == ["step"])
    assert all(lines.index(note) < table for note in notes)


def test_docstring_examples_hold():
    result = doctest.testmod(effects)
    assert result.attempted and not result.failed
