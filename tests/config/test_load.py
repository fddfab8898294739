"""Reading, overriding, wording the faults of, and printing run configs."""

import datetime
import doctest
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisim.config import (
    RunConfig,
    config_from_mapping,
    dump_config,
    load_config,
    parse_override,
)
from mpisim.config import load as load_module
from mpisim.config.load import MAX_FILE_BYTES
from mpisim.errors import ConfigError


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def faults(*arguments):
    with pytest.raises(ConfigError) as caught:
        load_config(*arguments)
    return str(caught.value).splitlines()


def test_an_empty_file_is_the_default_config(tmp_path):
    assert load_config(write(tmp_path, "")) == RunConfig()


def test_values_keep_their_types(tmp_path):
    config = load_config(
        write(
            tmp_path, "[model]\nhidden = [3, 5]\n[optimizer]\nlr = 1\n[parallel]\noverlap = false"
        )
    )
    assert config.model.hidden == (3, 5)
    assert config.optimizer.lr == 1.0 and isinstance(config.optimizer.lr, float)
    assert config.parallel.overlap is False


@pytest.mark.parametrize(
    ("line", "start"),
    [
        ('train.steps = "1"', 'train.steps must be a whole number; got "1". '),
        ("train.steps = 1.0", "train.steps must be a whole number; got 1.0. "),
        ("train.steps = true", "train.steps must be a whole number; got true. "),
        ("train.steps = 0", "train.steps must be at least 1; got 0. "),
        ('optimizer.lr = "fast"', 'optimizer.lr must be a number; got "fast". '),
        ("optimizer.lr = 0.0", "optimizer.lr must be greater than 0; got 0.0. "),
        ("optimizer.lr = inf", "optimizer.lr must be a finite number; got inf. "),
        ("optimizer.beta1 = 1.0", "optimizer.beta1 must be less than 1; got 1.0. "),
        ("run.seed = -1", "run.seed must be at least 0; got -1. "),
        ("run.seed = 18446744073709551616", "run.seed must be at most 9223372036854775807; got "),
        ("parallel.overlap = 1", "parallel.overlap must be true or false; got 1. "),
        ("run.name = 3", "run.name must be text; got 3. "),
        ("run.name = 2020-01-02", "run.name must be text; got the date or time 2020-01-02. "),
        ('run.name = "a/b"', 'run.name must match ^[A-Za-z0-9][A-Za-z0-9._-]*$; got "a/b". '),
        ('run.dir = ""', 'run.dir must not be empty; got "". '),
        ("model.hidden = 4", "model.hidden must be a list; got 4. "),
        ("model.hidden = [4, 0]", "model.hidden[1] must be at least 1; got 0. "),
        ('data.kind = "pickle"', 'data.kind must be "stdlib", "text" or "regression"; got "pickle'),
        ("train = 3", "train must be a section; got 3. "),
        ("version = 2", "version must be 1; got 2. "),
        ("version = true", "version must be 1; got true. "),
    ],
)
def test_a_wrong_value_is_told_in_one_line_with_rule_value_and_remedy(tmp_path, line, start):
    (fault,) = faults(write(tmp_path, line))
    assert fault.startswith(start)
    assert fault.endswith((".", "?"))


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ("train.step = 3", "train.steps"),
        ("train.globalbatch = 3", "train.global_batch"),
        ("train.batch_size = 3", "train.global_batch"),
        ("train.lr = 0.1", "optimizer.lr"),
        ("optimizer.learning_rate = 0.1", "optimizer.lr"),
        ("optimizer.momentumm = 0.1", "optimizer.momentum"),
        ("comm.timeout = 3", "comm.timeout_s"),
        ("lr = 0.1", "optimizer.lr"),
        ("modle.hidden = [3]", "model"),
        ("verison = 1", "version"),
    ],
)
def test_an_unknown_name_comes_with_the_nearest_valid_one(tmp_path, line, nearest):
    (fault,) = faults(write(tmp_path, line))
    name = line.split(" = ")[0]
    assert fault.split(" ")[0] in (name, name.split(".")[0])
    assert fault.endswith(f"The nearest valid name is {nearest}.")


def test_an_unknown_name_near_to_nothing_comes_with_all_names_of_its_section(tmp_path):
    (fault,) = faults(write(tmp_path, "comm.qqq = 1"))
    assert "The keys of [comm] are algorithm, synchronous_sends, timeout_s" in fault


def test_a_wrong_choice_comes_with_the_nearest_one(tmp_path):
    (fault,) = faults(write(tmp_path, 'optimizer.kind = "adam"'))
    assert 'Did you mean "adamw"?' in fault


def test_all_faults_are_told_at_once(tmp_path):
    text = "version = 3\n[run]\nseed = -1\ncolour = 1\n[train]\nsteps = 0\n"
    text += "[modle]\n[model]\nhidden = [0]"
    told = faults(write(tmp_path, text), ["optimizer.lr=fast", "nonsense"])
    assert [fault.split(" ")[0] for fault in told] == [
        "--set", "version", "run.seed", "run.colour", "model.hidden[0]", "optimizer.lr",
        "train.steps", "modle",
    ]  # fmt: skip


def test_a_rule_between_fields_is_told_in_the_same_form(tmp_path):
    (fault,) = faults(write(tmp_path, 'data.kind = "text"'))
    assert fault.startswith('data.path must be set exactly when data.kind is "text"; got ')


def test_errors_show_nothing_of_the_library_behind_them(tmp_path):
    told = "\n".join(faults(write(tmp_path, "a = 1\ntrain.steps = []\nrun = 1")))
    assert "pydantic" not in told and "http" not in told and "Input should" not in told


@pytest.mark.parametrize("character", ["\x1b", "\x9b", "\u202e"])
def test_control_characters_do_not_reach_the_terminal(tmp_path, character):
    (fault,) = faults(write(tmp_path, ""), [f"run.name={character}[31m"])
    assert character not in fault and f"\\u{ord(character):04x}" in fault


def test_a_long_value_is_cut(tmp_path):
    (fault,) = faults(write(tmp_path, f'run.name = "{"x" * 5000}"'))
    assert len(fault) < 300


def test_a_syntax_error_names_the_line(tmp_path):
    (fault,) = faults(write(tmp_path, "[run]\nname = \n"))
    assert "must be valid TOML" in fault and "at line 2" in fault


def test_files_that_are_no_config(tmp_path):
    (fault,) = faults(tmp_path / "nowhere.toml")
    assert "nowhere.toml must exist; got no such file." in fault
    (fault,) = faults(tmp_path)
    assert "must be a file; got a directory." in fault
    (fault,) = faults("/dev/zero")
    assert "must be a plain file" in fault
    path = tmp_path / "latin.toml"
    path.write_bytes(b'run.name = "\xe9"')
    (fault,) = faults(path)
    assert "must be UTF-8 text; got byte 0xe9 at offset 12." in fault
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    (fault,) = faults(path)
    assert f"must be at most {MAX_FILE_BYTES} bytes long" in fault
    path.write_bytes(b"a = " + b"[" * 5000)
    (fault,) = faults(path)
    assert "must be valid TOML" in fault
    (fault,) = faults("a\0b")
    assert "must have a usable path" in fault


def test_a_byte_order_mark_is_no_fault(tmp_path):
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbftrain.steps = 3\n")
    assert load_config(path).train.steps == 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("train.steps=20", 20),
        ("train.steps = 20", 20),
        ("optimizer.lr=3e-4", 3e-4),
        ("parallel.overlap=false", False),
        ("model.hidden=[8, 4]", [8, 4]),
        ('run.name="a b"', "a b"),
        ("run.name=first", "first"),
        ("data.path=a=b.txt", "a=b.txt"),
        ("data.path=", ""),
        ("run.name=x\nsteps = 3", "x\nsteps = 3"),
        ("run.name=1\nsteps = 3", "1\nsteps = 3"),
    ],
)
def test_an_override_is_toml_or_else_text(text, value):
    section, key, parsed = parse_override(text)
    assert (section, key) == tuple(text.split("=")[0].strip().split("."))
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize("text", ["", "train.steps", "=3", ".steps=3", "train.=3", "a.b.c=3"])
def test_an_override_of_another_form_is_refused(text):
    with pytest.raises(ConfigError, match=r"--set must have the form section\.key=value; got "):
        parse_override(text)


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path):
    path = write(tmp_path, "train.steps = 3\ntrain.global_batch = 7")
    config = load_config(path, ["train.steps=4", "optimizer.lr=0.5", "train.steps=5"])
    assert (config.train.steps, config.train.global_batch, config.optimizer.lr) == (5, 7, 0.5)


def test_a_wrong_override_says_where_it_came_from(tmp_path):
    (fault,) = faults(write(tmp_path, "train.steps = 3"), ["train.steps=-4"])
    assert fault.startswith("train.steps must be at least 1; got -4 (from --set).")


def test_a_mapping_is_a_config_and_is_not_changed():
    values = {"model": {"hidden": [3]}, "train": {"steps": 2}}
    assert config_from_mapping(values).model.hidden == (3,)
    assert values == {"model": {"hidden": [3]}, "train": {"steps": 2}}
    with pytest.raises(ConfigError, match="a config must be a mapping of sections; got 3"):
        config_from_mapping(3)
    with pytest.raises(ConfigError, match="run.name must be text; got the date or time"):
        config_from_mapping({"run": {"name": datetime.date(2020, 1, 1)}})


def test_the_printed_config_reads_back_as_the_same(tmp_path):
    assert load_config(write(tmp_path, dump_config(RunConfig()))) == RunConfig()


@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    folder=st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    seed=st.integers(0, 2**63 - 1),
    hidden=st.lists(st.integers(1, 2**40), max_size=5),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False),
    overlap=st.booleans(),
)
def test_any_config_reads_back_as_the_same(name, folder, seed, hidden, lr, overlap):
    config = config_from_mapping(
        {
            "run": {"name": name, "dir": folder, "seed": seed},
            "data": {"kind": "text", "path": folder},
            "model": {"hidden": hidden},
            "optimizer": {"lr": lr},
            "parallel": {"overlap": overlap},
        }
    )
    assert config_from_mapping(tomllib.loads(dump_config(config))) == config


def test_the_printed_config_explains_every_field():
    lines = dump_config(RunConfig()).splitlines()
    explained = 0
    for before, line in zip(lines, lines[1:], strict=False):
        if " = " in line and not line.startswith("#"):
            assert before.startswith("# "), line
            explained += 1
    sections = [info.annotation for info in RunConfig.model_fields.values()]
    fields = sum(len(getattr(section, "model_fields", ())) for section in sections)
    # Every field and the version; data.path and run.init_from are not set.
    assert explained == fields + 1 - 2
    assert "# path is not set" in lines


def test_the_examples_in_the_docstrings_hold():
    results = doctest.testmod(load_module)
    assert results.attempted >= 3 and results.failed == 0
