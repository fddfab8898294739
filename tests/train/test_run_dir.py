"""The run directory: when it may be made, what is never deleted, how its files are written."""

from __future__ import annotations

import json
import os

import pytest
from small_jobs import make_config, train

import mpisim
import mpisim.train.loop as loop
from mpisim.errors import CheckpointError, ConfigError, MpisimError
from mpisim.train.rundir import (
    check_run_dir,
    create_run_dir,
    read_json,
    run_dir_of,
    write_json,
)


def snapshot(folder):
    """Return every file below `folder` with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def run(config, **options):
    return mpisim.run(config, ranks=2, transport="local", **options)


def test_what_a_finished_run_holds(tmp_path):
    done = train(make_config(tmp_path), 3)
    assert done.path == tmp_path / "runs" / "run"
    assert sorted(snapshot(done.path)) == [
        "metrics.jsonl", "run.json", "summary.json", "trace", "trace/rank-0000.bin",
        "trace/rank-0001.bin", "trace/rank-0002.bin", "weights.safetensors",
    ]  # fmt: skip


def test_a_directory_that_exists_is_refused(tmp_path):
    """Issue 2, bad input: refused unless --overwrite; the earlier run stays."""
    config = make_config(tmp_path)
    path = run(config).path
    before = snapshot(path)
    with pytest.raises(ConfigError, match=r"run directory must be new; got .*run.*--overwrite"):
        run(config)
    assert snapshot(path) == before


def test_overwrite_replaces_the_whole_earlier_run(tmp_path):
    config = make_config(tmp_path)
    path = run(config).path
    (path / "trace" / "rank-0099.bin").write_bytes(b"old")
    (path / "notes.txt").write_text("old")
    before = snapshot(path)
    again = run(make_config(tmp_path, run={"seed": 8}), overwrite=True)
    assert again.path == path
    after = snapshot(path)
    assert "notes.txt" not in after and "trace/rank-0099.bin" not in after
    assert after["run.json"] != before["run.json"]


def test_overwrite_of_nothing_is_a_new_run(tmp_path):
    assert run(make_config(tmp_path), overwrite=True).path.is_dir()


def test_an_empty_directory_may_be_used_with_overwrite(tmp_path):
    (tmp_path / "runs" / "run").mkdir(parents=True)
    assert run(make_config(tmp_path), overwrite=True).summary["status"] == "done"


@pytest.mark.parametrize("foreign", ["letters/mail.txt", "summary.json", "trace/rank-0000.bin"])
def test_a_foreign_folder_is_never_deleted(tmp_path, foreign):
    """Overwrite replaces a run directory and nothing else."""
    path = tmp_path / "runs" / "run"
    file = path / foreign
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    before = snapshot(tmp_path / "runs")
    with pytest.raises(ConfigError, match="must hold an earlier run to be overwritten"):
        run(make_config(tmp_path), overwrite=True)
    assert snapshot(tmp_path / "runs") == before


@pytest.mark.parametrize("text", ["{}", '{"name": "my own run"}', "[]", "not JSON", ""])
def test_a_folder_with_another_run_json_is_never_deleted(tmp_path, text):
    """A file of that name alone does not make a run directory."""
    path = tmp_path / "runs" / "run"
    path.mkdir(parents=True)
    (path / "run.json").write_text(text)
    (path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="must hold an earlier run to be overwritten"):
        run(make_config(tmp_path), overwrite=True)
    assert (path / "thesis.tex").read_text() == "mine"


def test_a_file_in_the_place_of_the_directory_is_never_deleted(tmp_path):
    (tmp_path / "runs").mkdir()
    file = tmp_path / "runs" / "run"
    file.write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="run directory must"):
            run(make_config(tmp_path), overwrite=overwrite)
    assert file.read_text() == "mine"


def test_a_link_to_a_run_is_not_followed(tmp_path):
    """The run behind the link has a name of its own; only that name may replace it."""
    config = make_config(tmp_path)
    real = run(config).path
    other = make_config(tmp_path, run={"name": "latest"})
    run_dir_of(other).symlink_to(real, target_is_directory=True)
    before = snapshot(real)
    with pytest.raises(ConfigError, match="must hold an earlier run to be overwritten"):
        run(other, overwrite=True)
    assert snapshot(real) == before and run_dir_of(other).is_symlink()


def test_a_run_that_was_killed_early_can_be_overwritten(tmp_path):
    """run.json is there as soon as the directory is anything more than empty."""
    config = make_config(tmp_path)
    path = run(config).path
    for name in ("summary.json", "metrics.jsonl"):
        (path / name).unlink()
    assert run(config, overwrite=True).summary["status"] == "done"


@pytest.mark.parametrize(
    "fault",
    [
        {"train": {"global_batch": 25}},  # not divisible by 2 ranks
        {"train": {"global_batch": 400}},  # more rows than there are
        {"parallel": {"dp": 3}},
        {"data": {"kind": "text", "path": "no/such/file"}},
    ],
)
def test_a_setup_that_fails_leaves_the_earlier_run_untouched(tmp_path, fault):
    """Issue 2, accidents: earlier runs untouched."""
    config = make_config(tmp_path)
    path = run(config).path
    before = snapshot(tmp_path / "runs")
    values = config.model_dump(mode="json")
    for section, changes in fault.items():
        values[section] |= changes
    with pytest.raises(ConfigError):
        run(values, overwrite=True)
    assert snapshot(tmp_path / "runs") == before
    assert path.is_dir()


def test_a_record_that_cannot_be_made_leaves_the_earlier_run_untouched(tmp_path, monkeypatch):
    """All that can fail is done before the earlier run is deleted."""
    config = make_config(tmp_path)
    path = run(config).path
    before = snapshot(path)

    def fail(*args):
        raise ConfigError("made up")

    monkeypatch.setattr(loop, "run_record", fail)
    with pytest.raises(ConfigError, match="made up"):
        run(config, overwrite=True)
    assert snapshot(path) == before


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    """A file stands where the parent should be."""
    (tmp_path / "file").write_text("mine")
    config = make_config(tmp_path, run={"dir": str(tmp_path / "file" / "runs")})
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"run\.dir must be a writable folder; got .*file"):
            run(config, overwrite=overwrite)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that refuses all")
def test_a_folder_that_refuses_even_root_is_named(tmp_path):
    """Issue 2, bad input: unwritable disk."""
    config = make_config(tmp_path, run={"dir": "/proc/mpisim-test"})
    with pytest.raises(ConfigError, match=r"run\.dir must be a writable folder; got /proc/"):
        run(config)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_parent_without_permission_is_refused(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    config = make_config(tmp_path, run={"dir": str(closed)})
    with pytest.raises(ConfigError, match="cannot be written"):
        check_run_dir(config, overwrite=False)


def test_checking_changes_nothing(tmp_path):
    check_run_dir(make_config(tmp_path), overwrite=False)
    check_run_dir(make_config(tmp_path), overwrite=True)
    assert not (tmp_path / "runs").exists()


def test_a_relative_directory_is_where_the_command_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = make_config(tmp_path, run={"dir": "some/where", "name": "a.b-c_d"})
    done = run(config)
    assert done.path == tmp_path / "some" / "where" / "a.b-c_d"
    assert done.path.is_absolute()


def test_two_runs_beside_each_other(tmp_path):
    one = run(make_config(tmp_path, run={"name": "one"})).path
    before = snapshot(one)
    run(make_config(tmp_path, run={"name": "two"}), overwrite=True)
    assert snapshot(one) == before


def test_a_directory_that_appears_meanwhile_is_not_overwritten(tmp_path):
    """Two starts at once: the second loses, it does not mix its files in."""
    path = tmp_path / "runs" / "run"
    create_run_dir(path, overwrite=False)
    with pytest.raises(ConfigError, match=r"run\.dir must be a writable folder; got "):
        create_run_dir(path, overwrite=False)


# --- JSON files ------------------------------------------------------------------------------


def test_json_is_replaced_in_one_piece(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    write_json(path, {"a": [2]})
    assert read_json(path) == {"a": [2]}
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]


def test_a_missing_or_damaged_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"must hold a\.json; got .*No such file"):
        read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"a": ')
    with pytest.raises(CheckpointError, match=r"a\.json must be JSON; got .*Run the job again"):
        read_json(tmp_path / "a.json")
    assert issubclass(CheckpointError, MpisimError)


def test_all_files_are_plain_json(tmp_path):
    """Any reader of JSON reads them: no NaN, one object per line."""

    def refuse(text):
        raise ValueError(text)

    done = train(make_config(tmp_path), 2)
    for name in ("run.json", "summary.json"):
        json.loads((done.path / name).read_text(), parse_constant=refuse)
    for line in (done.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
