"""Files of users that register schedules, codecs, collectives, activations and models.

A file is run once per process, when a config that names it is set up: before any message. What it
may call: `plan.schedules.register_schedule`, `comm.codecs.register_codec`,
`layouts.steps.register_all_reduce`, `nn.models.register_activation`, `register_model`.
"""

from __future__ import annotations

import difflib
import hashlib
import runpy
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from mpisim.config.schema import RunConfig
from mpisim.errors import ConfigError
from mpisim.layouts.steps import algorithm_names
from mpisim.nn.models import ACTIVATIONS, Model

ModelBuilder = Callable[[RunConfig], Model]

MODELS: dict[str, ModelBuilder] = {}
"""Builders of models by name, beside the built-in ones of `train.setup`."""

_BUILT_IN_MODELS = ("mlp", "decoder")

_loaded: dict[Path, str] = {}
"""File -> sha256 of what was run."""


def register_model(name: str, build: ModelBuilder) -> None:
    """Make a model known under `name`, for the config's model.kind.

    Parameters
    ----------
    name : str
        Not a built-in one. One that was registered before means this one from now on.
    build : callable of RunConfig to Model
        Called with the whole config. The model's input is that of an MLP: windows of bytes for data
        kinds text and stdlib, features for regression.

    Raises
    ------
    ConfigError
        The name is built in.
    """
    if not name.strip() or name in _BUILT_IN_MODELS:
        raise ConfigError(
            f"name of a model must be a word of its own; got {name!r}. Choose one that is none of "
            f"{', '.join(_BUILT_IN_MODELS)}."
        )
    if not callable(build):
        raise ConfigError(f"builder of model {name!r} must be a function; got {build!r}. Give one.")
    MODELS[name] = build


def load_extensions(
    files: Iterable[str], recorded: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Run the files that were not run before, as they are now.

    Parameters
    ----------
    files : iterable of str
        Paths, relative to the working directory.
    recorded : mapping of str to str, optional
        File -> sha256 that it must have, as a run's record says.

    Returns
    -------
    dict of str to str
        File -> sha256 of its contents.

    Raises
    ------
    ConfigError
        A file cannot be read, is not the recorded one, or fails.
    """
    found = {}
    for name in files:
        path = Path(name).absolute()
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"run.extensions must be Python files that can be read; got "
                f"{getattr(error, 'strerror', None) or error} for {name[:200]}. Correct the path; "
                f"it is relative to where the command is started."
            ) from None
        if recorded is not None and recorded.get(name) != digest:
            raise ConfigError(
                f"an extension must be the file that the run was trained with; got another sha256 "
                f"for {name[:200]}. Bring back that version."
            )
        found[name] = digest
        if _loaded.get(path) == digest:
            continue
        try:
            runpy.run_path(str(path), run_name=f"mpisim_extension_{path.stem}")
        except (Exception, SystemExit) as error:
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__)
                     if f.filename == str(path)]  # fmt: skip
            where = f" at line {lines[-1]}" if lines else ""
            text = " ".join(str(error).split())
            if isinstance(error, ConfigError):
                raise ConfigError(f"{text} (It is in {name}{where}.)") from None
            raise ConfigError(
                f"an extension must run without an error; got {type(error).__name__}: {text} in "
                f"{name}{where}. Correct the file."
            ) from error
        _loaded[path] = digest
    return found


def require_names(config: RunConfig) -> None:
    """Refuse names that nobody has registered; schedules and codecs are looked up elsewhere.

    Raises
    ------
    ConfigError
        With the known names, the nearest first.
    """
    known = {
        "model.kind": (config.model.kind, (*_BUILT_IN_MODELS, *MODELS)),
        "model.activation": (config.model.activation, tuple(ACTIVATIONS)),
        "comm.algorithm": (config.comm.algorithm, algorithm_names()),
    }
    for key, (name, names) in known.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            advice = (
                f"Did you mean {close[0]!r}?"
                if close
                else ("Name one of them, or the file that registers it in run.extensions.")
            )
            raise ConfigError(f"{key} must be one of {', '.join(names)}; got {name!r}. {advice}")
