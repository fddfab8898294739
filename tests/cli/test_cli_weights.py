"""`mpisim weights`, and `mpisim sample` on stage files."""

import json

import pytest

from mpisim.cli import main
from mpisim.config import config_from_mapping
from mpisim.launch.rank import BLAS_VARIABLES
from mpisim.nn.params import init_params
from mpisim.train.record import digest
from mpisim.train.setup import build_model
from mpisim.train.stage_files import (
    WEIGHTS_FOLDER,
    aliases_of,
    save_manifest,
    save_stage,
    stage_file,
)
from mpisim.train.weights import WEIGHTS_FILE, save_weights

CONFIG = config_from_mapping(
    {
        "data": {"kind": "stdlib", "window": 8},
        "model": {"kind": "decoder", "d_model": 8, "num_blocks": 2, "num_heads": 2},
    }
)
FACTS = {"run": "r"}


@pytest.fixture(autouse=True)
def same_environment(monkeypatch):
    """Take back what a command sets for its own process."""
    for name in BLAS_VARIABLES:
        monkeypatch.setenv(name, "1")


@pytest.fixture
def runs(tmp_path):
    """Return two run directories with the same weights: in one file, and in two stage files."""
    model = build_model(CONFIG)
    # Of this seed; that of others may end its text at once.
    params = init_params(model, 1, "float32")
    for name in ("whole", "split"):
        (tmp_path / name).mkdir()
        record = {"config": CONFIG.model_dump(mode="json")}
        (tmp_path / name / "run.json").write_text(json.dumps(record))
    save_weights(tmp_path / "whole" / WEIGHTS_FILE, params, FACTS)
    folder = tmp_path / "split" / WEIGHTS_FOLDER
    records = []
    for stage, blocks in enumerate((["embed", "block0"], ["block1", "head"])):
        own = {name: array for name, array in params.items() if name.split(".")[0] in blocks}
        records.append(
            save_stage(folder, stage, own, FACTS, specs=model.param_specs(), blocks=blocks)
        )
    save_manifest(folder, records, aliases=aliases_of(model), metadata=FACTS)
    return tmp_path


def complaint(capsys):
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    (line,) = err.splitlines()
    assert line.startswith("mpisim: ")
    return line


def spoil(path, offset=-3):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_the_table_lists_stages_and_what_is_shared(capsys, runs):
    assert main(["weights", str(runs / "split")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert "float32" in lines[0] and lines[0].endswith("sha256 agrees in 2 of 2 files")
    assert lines[2].split() == ["stage", "parameters", "numbers", "bytes", "file", "blocks"]
    assert lines[3].startswith("    0 ") and lines[3].endswith(f"{stage_file(0)} embed, block0")
    assert lines[4].startswith("    1 ") and lines[4].endswith(f"{stage_file(1)} block1, head")
    shared = f"head.output.weight is embed.tokens.weight, stored once in {stage_file(0)}"
    assert lines[5:] == [shared]
    assert main(["weights", str(runs / "split"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["blocks"] for row in rows] == [["embed", "block0"], ["block1", "head"]]
    assert [int(line.split()[3]) for line in lines[3:5]] == [row["bytes"] for row in rows]
    assert main(["weights", str(runs / "whole"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["bytes"] == sum(each["bytes"] for each in rows)
    assert main(["weights", str(runs / "whole")]) == 0
    assert "sha256" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["whole", "split"])
def test_out_writes_the_file_of_an_unsplit_run(capsys, runs, name):
    out = runs / "out.safetensors"
    assert main(["weights", str(runs / name), "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {out}\n")
    expected = (runs / "whole" / WEIGHTS_FILE).read_bytes()
    assert out.read_bytes() == expected
    out.write_text("mine")
    assert main(["weights", str(runs / name), "--out", str(out)]) == 2
    assert "--overwrite" in complaint(capsys)
    assert out.read_text() == "mine"
    assert main(["weights", str(runs / name), "--out", str(out), "--overwrite", "--json"]) == 0
    json.loads(capsys.readouterr().out)
    assert out.read_bytes() == expected


def test_weights_that_cannot_be_used(capsys, runs):
    run, folder = runs / "split", runs / "split" / WEIGHTS_FOLDER
    out = runs / "out"
    for arguments, words in (
        (["--out", str(runs)], "--out"),
        (["--out", str(runs / "missing" / "out")], "folder that exists"),
        (["--out", str(folder / stage_file(0)), "--overwrite"], "outside of the stage files"),
    ):
        assert main(["weights", str(run), *arguments]) == 2
        assert words in complaint(capsys)
    spoil(folder / stage_file(1))
    for command in (["weights", str(run)], ["weights", str(run), "--out", str(out)],
                    ["sample", str(run)]):  # fmt: skip
        assert main(command) == 1
        assert "sha256" in complaint(capsys)
    (folder / stage_file(1)).unlink()
    assert main(["weights", str(run)]) == 1
    assert "no such file" in complaint(capsys)
    (folder / "manifest.json").unlink()
    assert main(["weights", str(run)]) == 1
    assert "not written to the end" in complaint(capsys)
    (runs / "whole" / WEIGHTS_FILE).unlink()
    assert main(["weights", str(runs / "whole")]) == 1
    assert WEIGHTS_FILE in complaint(capsys)
    assert main(["weights", str(runs)]) == 2
    assert "run.json" in complaint(capsys)
    assert not out.exists()


def test_sample_writes_the_same_text_from_stage_files(capsys, runs):
    texts = []
    for name in ("whole", "split"):
        assert main(["sample", str(runs / name), "--prompt", "def ", "--tokens", "40"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) > 10


def test_sample_compares_stage_files_with_the_record_of_the_whole_model(capsys, runs):
    """No rank's own digest is that of the whole model."""
    params = init_params(build_model(CONFIG), 1, "float32")
    summary = {"ranks": [{"params_sha256": "0" * 64}]}
    for recorded, status in ((None, 0), (digest(params), 0), ("1" * 64, 1)):
        if recorded:
            summary["params_sha256"] = recorded
        (runs / "split" / "summary.json").write_text(json.dumps(summary))
        assert main(["sample", str(runs / "split"), "--tokens", "2"]) == status
        if status:
            assert "weights must be those that the run saved" in complaint(capsys)
        capsys.readouterr()
