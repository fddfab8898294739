"""Read a run config from TOML, apply `--set` overrides, and word what is wrong with it.

All faults of a file are reported at once, one line each; what a field means and allows is said
in `schema`, never here. Called by `cli` (files) and `mpisim.run` (mappings).
"""

from __future__ import annotations

import datetime
import json
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from mpisim.config.schema import SCHEMA_VERSION, RunConfig, Section
from mpisim.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
"""A longer config file is refused before it is read."""

_NUMBER_RULES = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_TYPE_RULES = {
    "int_type": ("a whole number", "Write digits only, without quotes or a decimal point"),
    "float_type": ("a number", "Write it without quotes"),
    "finite_number": ("a finite number", "Write an ordinary number"),
    "bool_type": ("true or false", "Write true or false, without quotes"),
    "string_type": ("text", 'Write it in quotes, like "text"'),
    "tuple_type": ("a list", "Write it in brackets, like [256, 128]"),
}


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a config file and validate it.

    Parameters
    ----------
    path : str or Path
        A TOML file in UTF-8, at most `MAX_FILE_BYTES` long.
    overrides : iterable of str
        ``section.key=value`` texts as `--set` takes them; of two for one key the last counts.

    Returns
    -------
    RunConfig
        The resolved config: every field has its value or its default.

    Raises
    ------
    ConfigError
        The file cannot be read, is not TOML, or breaks rules of the schema. The message holds
        one line per fault.
    """
    values = _read_toml(Path(path))
    faults = []
    changed = set()
    for text in overrides:
        try:
            section, key, value = parse_override(text)
        except ConfigError as error:
            faults.append(str(error))
            continue
        changed.add((section, key) if section else (key,))
        if not section:
            values[key] = value
        elif isinstance(target := values.setdefault(section, {}), dict):
            target[key] = value
        # A section that is no table is reported by the validation below.
    return _validated(values, changed, faults)


def config_from_mapping(values: Mapping[str, Any]) -> RunConfig:
    """Validate a config given as nested mappings: section name to field name to value.

    Parameters
    ----------
    values : mapping
        What a TOML file would hold; lists and tuples are the same.

    Returns
    -------
    RunConfig
        The resolved config.

    Raises
    ------
    ConfigError
        The mapping breaks rules of the schema. The message holds one line per fault.

    Examples
    --------
    >>> config_from_mapping({"train": {"steps": 3}}).train.steps
    3
    """
    return _validated(values, set(), [])


def parse_override(text: str) -> tuple[str, str, Any]:
    """Split a ``section.key=value`` text.

    Parameters
    ----------
    text : str
        The value is read as TOML; what is not TOML is taken as text, so that quotes can be left
        out.

    Returns
    -------
    section, key : str
        `section` is empty for a key that stands outside of any section (`version`).
    value : object
        bool, int, float, str, list, dict, or a date or time.

    Raises
    ------
    ConfigError
        The text has no ``=``, or its left side is not one or two names.

    Examples
    --------
    >>> parse_override("optimizer.lr=3e-4")
    ('optimizer', 'lr', 0.0003)
    >>> parse_override("run.name=first")
    ('run', 'name', 'first')
    """
    name, equals, raw = text.partition("=")
    parts = [part.strip() for part in name.split(".")]
    if not equals or len(parts) > 2 or not all(parts):
        raise ConfigError(
            f"--set must have the form section.key=value; got {_shown(text)}. "
            f"Write for example --set train.steps=20."
        )
    section, key = parts if len(parts) == 2 else ("", parts[0])
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return section, key, raw.strip()
    # A line break in `raw` could smuggle in a second key.
    return section, key, parsed["value"] if len(parsed) == 1 else raw


def dump_config(config: RunConfig) -> str:
    """Write a resolved config as TOML, with each field's meaning as a comment above it.

    Parameters
    ----------
    config : RunConfig
        Any config.

    Returns
    -------
    str
        TOML text; `load_config` reads it back as an equal config. A field that is not set has
        no value in TOML and stands there as a comment.
    """
    import tomli_w

    def assignment(key: str, value: Any) -> str:
        if value is None:
            return f"# {key} is not set"
        if isinstance(value, tuple):
            items = (tomli_w.dumps({"x": item})[len("x = ") :].strip() for item in value)
            return f"{key} = [{', '.join(items)}]"
        return tomli_w.dumps({key: value}).strip()

    def comments(model: type[Section], key: str) -> Iterator[str]:
        for line in (model.model_fields[key].description or "").splitlines():
            yield f"# {line.strip()}"

    lines: list[str] = [*comments(RunConfig, "version"), assignment("version", config.version)]
    for name in RunConfig.model_fields:
        section = getattr(config, name)
        if not isinstance(section, Section):
            continue
        summary = (type(section).__doc__ or "").strip().splitlines()[:1]
        lines += ["", *(f"# {line}" for line in summary), f"[{name}]"]
        for key in type(section).model_fields:
            lines += [*comments(type(section), key), assignment(key, getattr(section, key))]
    return "\n".join(lines) + "\n"


def _read_toml(path: Path) -> dict[str, Any]:
    def refuse(rule: str, got: str, fix: str) -> ConfigError:
        return ConfigError(f"config file {path} must {rule}; got {got}. {fix}.")

    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise refuse("be a file", "a directory", "Name a TOML file inside it")
        # Reading a pipe or a device could wait for ever; only a plain file has an end.
        if not stat.S_ISREG(mode):
            raise refuse("be a plain file", "a pipe or a device", "Save it as a file first")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise refuse("exist", "no such file", "Check the path and the folder you are in") from None
    except OSError as error:
        raise refuse("be readable", error.strerror, "Check its path and permissions") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise refuse("have a usable path", str(error), "Correct the path") from None
    if len(data) > MAX_FILE_BYTES:
        raise refuse(f"be at most {MAX_FILE_BYTES} bytes long", "more", "Is this the config?")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        got = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise refuse("be UTF-8 text", got, "Save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise refuse("be valid TOML", f"an error: {error}", "Correct that line") from None
    except RecursionError:
        raise refuse("be valid TOML", "lists nested too deep", "Flatten them") from None


def _validated(values: Mapping[str, Any], changed: set[tuple], faults: list[str]) -> RunConfig:
    """Validate `values`; raise one ConfigError with `faults` and every fault found here."""
    values = _tuples(values)
    if not isinstance(values, dict):
        raise ConfigError(
            f"a config must be a mapping of sections; got {_shown(values)}. "
            f"Pass a mapping, a RunConfig or the path of a TOML file."
        )
    version = values.get("version", SCHEMA_VERSION)
    if type(version) is not int or version != SCHEMA_VERSION:
        values.pop("version")
        faults.append(
            f"version must be {SCHEMA_VERSION}; got {_shown(version)}. "
            f"Write the file for version {SCHEMA_VERSION}, as `mpisim config` prints it."
        )
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            faults.append(_sentence(detail, changed))
    if faults:
        raise ConfigError("\n".join(faults))
    return config


def _tuples(value: Any) -> Any:
    """Copy nested mappings and lists as dicts and tuples: strict fields take no lists."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in value)
    return value


def _sentence(detail: Mapping[str, Any], changed: set[tuple]) -> str:
    """Word one pydantic error in the project's form."""
    kind, loc, ctx = detail["type"], detail["loc"], detail.get("ctx", {})
    if kind == "value_error":
        return str(ctx["error"])
    field = _field(loc)
    name = ".".join(str(part) for part in loc if not isinstance(part, int))
    name += "".join(f"[{part}]" for part in loc if isinstance(part, int))
    got = _shown(detail["input"])
    if loc[:2] in changed:
        got += " (from --set)"
    if kind == "extra_forbidden":
        return _unknown_key(loc, name)
    if kind == "model_type":
        return f"{name} must be a section; got {got}. Write [{name}] on a line of its own."
    if kind in _NUMBER_RULES:
        words, bound = _NUMBER_RULES[kind]
        rule, fix = f"be {words} {ctx[bound]:g}", "Set a value in that range"
        if isinstance(ctx[bound], int):
            rule = f"be {words} {ctx[bound]}"
    elif kind in _TYPE_RULES:
        words, fix = _TYPE_RULES[kind]
        rule = f"be {words}"
    elif kind == "literal_error":
        choices = _choices(ctx["expected"])
        rule = f"be {_listed(choices)}"
        close = _closest(detail["input"], choices) if isinstance(detail["input"], str) else None
        fix = f'Did you mean "{close}"' if close else "Choose one of these"
    elif kind == "string_pattern_mismatch":
        rule, fix = f"match {ctx['pattern']}", _meaning(field) or "Write it in that form"
    elif kind == "string_too_short":
        rule, fix = "not be empty", "Write a text"
    elif kind == "string_too_long":
        rule, fix = f"have at most {ctx['max_length']} characters", "Shorten it"
    else:
        message = detail["msg"]
        rule, fix = f"meet its rule ({message[:1].lower()}{message[1:]})", "Correct it"
    default = None if field is None or len(loc) > 2 else field.get_default()
    if default is None or default is PydanticUndefined:
        tail = "?" if fix.startswith("Did") else "."
    else:
        tail = f"{'?' if fix.startswith('Did') else '.'} The default is {_shown(default)}."
    return f"{name} must {rule}; got {got}. {fix}{tail}"


def _unknown_key(loc: tuple, name: str) -> str:
    """Word an unknown section or key, naming the nearest valid one."""
    sections = {
        section: tuple(info.annotation.model_fields)
        for section, info in RunConfig.model_fields.items()
        if _is_section(info)
    }
    if len(loc) > 2:
        return f"{name} must be a known key; got a section inside [{loc[0]}]. Remove it."
    key = str(loc[-1])
    everywhere = {f"{section}.{k}": k for section, keys in sections.items() for k in keys}
    if len(loc) == 1:
        what, own = "section", {section: section for section in ("version", *sections)}
        rest = f"The sections are {', '.join(sections)}"
    else:
        what, own = "key", {f"{loc[0]}.{k}": k for k in sections[loc[0]]}
        rest = f"The keys of [{loc[0]}] are {', '.join(sections[loc[0]])}"
    # Its own section first, unless only another one has something much closer.
    nearest = max(
        (*own, *everywhere),
        key=lambda full: _likeness(key, everywhere.get(full, full)) + 0.15 * (full in own),
    )
    likeness = _likeness(key, everywhere.get(nearest, nearest))
    fix = f"The nearest valid name is {nearest}" if likeness >= 0.6 else rest
    return f"{name} must be a known {what}; got an unknown name. {fix}."


def _likeness(word: str, candidate: str) -> float:
    """Score 0..1 how likely `candidate` is what was meant: spelling, words, initials."""
    import difflib

    words = word.lower().replace("-", "_").split("_")
    if len(words) > 1 and "".join(part[:1] for part in words) == candidate:
        return 0.9  # learning_rate: lr
    shared = set(words) & set(candidate.split("_"))
    by_words = 0.7 if any(len(part) > 2 for part in shared) else 0.0
    return max(by_words, difflib.SequenceMatcher(None, word.lower(), candidate).ratio())


def _closest(word: str, candidates: Iterable[str]) -> str | None:
    best = max(candidates, key=lambda candidate: _likeness(word, candidate))
    return best if _likeness(word, best) >= 0.6 else None


def _is_section(info: FieldInfo) -> bool:
    return isinstance(info.annotation, type) and issubclass(info.annotation, Section)


def _field(loc: tuple) -> FieldInfo | None:
    """Return the schema's entry for an error location, if it has one."""
    info = RunConfig.model_fields.get(loc[0])
    if info is None or len(loc) == 1 or not _is_section(info):
        return info
    return info.annotation.model_fields.get(loc[1])


def _meaning(field: FieldInfo | None) -> str:
    text = " ".join((field.description or "").split()) if field else ""
    return f"It is the {text[:1].lower()}{text[1:].rstrip('.')}" if text else ""


def _choices(expected: str) -> tuple[str, ...]:
    """Split pydantic's list of literals: ``'a', 'b' or 'c'``."""
    return tuple(part.strip(" '") for part in expected.replace(" or ", ", ").split(", "))


def _listed(choices: tuple[str, ...]) -> str:
    quoted = [f'"{choice}"' for choice in choices]
    if len(quoted) == 1:
        return quoted[0]
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def _shown(value: Any) -> str:
    """Write a value as TOML would, cut to a length that fits a line."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        # Control characters must not reach a terminal.
        text = json.dumps(value, ensure_ascii=not value.isprintable())
    elif isinstance(value, tuple | list):
        text = f"[{', '.join(_shown(item) for item in value[:20])}]"
    elif isinstance(value, Mapping):
        text = "a section"
    elif isinstance(value, datetime.date | datetime.time):
        text = f"the date or time {value.isoformat()}"
    else:
        text = repr(value)
    return text if len(text) <= 80 else text[:76] + " ..."
