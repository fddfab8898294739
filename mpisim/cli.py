"""The command line: parsing only; every command is one call into the package.

What a command needs is imported when it runs, so that `--help`, `config`, `report` and shell
completion answer at once and never start MPI. Errors meant for users become one line each and an
exit status here; nothing else in the package prints or exits.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from mpisim import __version__
from mpisim.errors import ConfigError, MpisimError

# The same numbers as in mpisim.launch, whose import costs time that --help need not spend.
_DONE, _FAILED, _WRONG_USE = 0, 1, 2

_EXIT_STATUS = """\b
Exit status, the same under every MPI:
  0  done
  1  the job failed, lost a rank or was interrupted
  2  wrong use or a wrong config"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Parameters
    ----------
    arguments : list of str, optional
        Without the program's name; by default those of this process.

    Returns
    -------
    int
        0 done; 1 the job failed, lost a rank or was interrupted; 2 wrong use or a wrong config.
    """
    try:
        status = cli.main(args=arguments, prog_name="mpisim", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else _DONE
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.Abort:
        return _complain("interrupted by Ctrl-C (SIGINT).", _FAILED)
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            # A group without a subcommand (click 8.2 and newer): its help, as it is.
            click.echo(error.format_message(), err=True)
            return _WRONG_USE
        text = " ".join(error.format_message().split())
        if isinstance(error, click.UsageError) and error.ctx is not None:
            text += f" See {error.ctx.command_path} --help."
        return _complain(text, _WRONG_USE)
    except ConfigError as error:
        return _complain(str(error), _WRONG_USE)
    except MpisimError as error:
        return _complain(str(error), _FAILED)
    except OSError as error:
        if error.filename is None:
            raise
        return _complain(f"{error.filename} must be usable; got {error.strerror}.", _FAILED)


def _complain(text: str, status: int) -> int:
    """Print an error, once per job: under mpirun every rank makes the same mistake."""
    from mpisim.launch import run_as_rank, under_mpi

    if under_mpi():
        error = ConfigError(text) if status == _WRONG_USE else MpisimError(text)

        def refuse(_job: Any) -> None:
            raise error

        return run_as_rank(refuse)
    for line in text.splitlines():
        print(f"mpisim: {line}", file=sys.stderr)
    return status


class _RunDirectory(click.Path):
    """A run directory; whether it is one is checked when it is used."""

    name = "run directory"

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        """Check that `value` holds a run."""
        path = Path(value)
        if not (path / "run.json").is_file():
            got = "one without run.json" if path.is_dir() else "no such directory"
            raise ConfigError(
                f"{path} must be a run directory; got {got}. "
                f"Name one that `mpisim train` wrote, like runs/NAME."
            )
        return path


class _Sizes(click.ParamType):
    """Message sizes: numbers of bytes, with KiB, MiB or GiB if wanted, between commas."""

    name = "sizes"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        """Turn text into sizes in bytes."""
        from mpisim.units import parse_bytes

        if not isinstance(value, str):
            return tuple(value)
        try:
            return tuple(parse_bytes(word) for word in value.split(","))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Size(click.ParamType):
    """A number of bytes, with KiB, MiB or GiB if wanted."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Turn text into bytes."""
        from mpisim.units import parse_bytes

        if not isinstance(value, str):
            return value
        try:
            return parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Steps(click.ParamType):
    """A range of steps such as 100:110."""

    name = "steps"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        first, colon, end = value.partition(":")
        if not (colon and first.isdigit() and end.isdigit() and int(first) < int(end)):
            self.fail(f"steps must be FIRST:END with FIRST below END; got {value!r}.", param, ctx)
        return int(first), int(end)


def _complete_override(_ctx: Any, _param: Any, incomplete: str) -> list[str]:
    from mpisim.config import RunConfig

    keys = [
        f"{section}.{key}="
        for section, info in RunConfig.model_fields.items()
        for key in getattr(info.annotation, "model_fields", ())
    ]
    return [key for key in keys if key.startswith(incomplete)]


_config_argument = click.argument("config", type=click.Path(path_type=Path))
_set_option = click.option(
    "--set",
    "overrides",
    metavar="SECTION.KEY=VALUE",
    multiple=True,
    shell_complete=_complete_override,
    help="Override a config field; may be repeated.",
)
_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print rows as JSON, and nothing else."
)
_run_argument = click.argument("run", type=_RunDirectory())


def _ranks_option(help_text: str, *, required: bool) -> Callable:
    return click.option(
        "--ranks", type=click.IntRange(min=1), required=required, metavar="N", help=help_text
    )


@click.group(epilog=_EXIT_STATUS, invoke_without_command=True)
@click.version_option(__version__, prog_name="mpisim", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Distributed training as a plan: ranks of NumPy over MPI.

    A run is one TOML file; `mpisim config` prints it with every default and what it means.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@cli.command(epilog=_EXIT_STATUS)
@_config_argument
@_ranks_option("Ranks to start; by default parallel.dp * parallel.pp.", required=False)
@_set_option
@click.option("--overwrite", is_flag=True, help="Replace the run directory if it exists.")
@click.option(
    "--hostfile", type=click.Path(), metavar="FILE", help="Hosts to run on, in your MPI's format."
)
@click.option(
    "--mpi-args",
    multiple=True,
    metavar="FLAGS",
    help='More flags for the launcher, like "--mca pml ucx".',
)
def train(
    config: Path,
    ranks: int | None,
    overrides: tuple[str, ...],
    overwrite: bool,
    hostfile: str | None,
    mpi_args: tuple[str, ...],
) -> int:
    """Train CONFIG on N ranks.

    Starts the ranks itself with the MPI that is installed. Started by mpirun or srun, this process
    is one of the ranks.
    """
    from mpisim.launch import (
        keep_freed_memory,
        launch,
        limit_blas_threads,
        rank_command,
        run_as_rank,
        under_mpi,
    )

    if place := under_mpi():
        limit_blas_threads()
        keep_freed_memory()

        def work(job: Any) -> None:
            if ranks not in (None, place[1]):
                raise ConfigError(
                    f"--ranks must equal the number of ranks that were started; got {ranks} with "
                    f"{place[1]}. Leave it out under mpirun."
                )
            resolved = _load(config, overrides)
            from mpisim.train import train_rank

            train_rank(resolved, job, overwrite=overwrite)

        return run_as_rank(work)

    resolved = _load(config, overrides)
    num_ranks = ranks or resolved.parallel.dp * resolved.parallel.pp
    if not num_ranks:
        raise ConfigError(
            "the number of ranks must be given; got no --ranks, and parallel.dp is 0. "
            "Add --ranks N."
        )
    from mpisim.train import check_run_dir

    check_run_dir(resolved, overwrite)
    words = ["train", str(config)]
    for override in overrides:
        words += ["--set", override]
    if overwrite:
        words.append("--overwrite")
    flags = [flag for text in mpi_args for flag in _split(text)]
    return launch(rank_command(words), num_ranks, hostfile=hostfile, mpi_args=flags)


@cli.command("config")
@_config_argument
@_set_option
def show_config(config: Path, overrides: tuple[str, ...]) -> None:
    """Print CONFIG with every default filled in and explained."""
    from mpisim.config import dump_config

    click.echo(dump_config(_load(config, overrides)), nl=False)


@cli.command()
@_config_argument
@_ranks_option("Ranks to plan for.", required=True)
@_set_option
@_json_option
def check(config: Path, ranks: int, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check the plan of CONFIG on N ranks, without data and without MPI."""
    resolved = _load(config, overrides)
    from mpisim.train import check as check_plan

    result = check_plan(resolved, ranks)
    _print_table(result.text, result.rows, as_json)


class _PlanGroup(click.Group):
    """A group whose first word may be a config file: then it is the search."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the command's name in front where it was left out."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["search", *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the short form of the search, too."""
        formatter.write_usage(ctx.command_path, "CONFIG --ranks N [--budget SIZE] [OPTIONS]")
        formatter.write_usage(ctx.command_path, "COMMAND [ARGS]...")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of the search before the commands."""
        search = self.commands["search"]
        records = [record for param in search.get_params(ctx) if (record := _help_of(param, ctx))]
        with formatter.section("Options of the search"):
            formatter.write_dl(records)
        self.format_commands(ctx, formatter)


def _help_of(param: click.Parameter, ctx: click.Context) -> tuple[str, str] | None:
    return param.get_help_record(ctx)


@cli.group(cls=_PlanGroup, epilog=_EXIT_STATUS)
def plan() -> None:
    """Search a layout of CONFIG that fits a budget, show the ops of a step, check a plan.

    `mpisim plan CONFIG --ranks N --budget 256MiB` (short for `plan search CONFIG ...`) tries
    microbatches, recompute, ZeRO stage, bucket size, prefetch and, if nothing else fits, 16-bit
    numbers; every layout is a real plan with an exact forecast of its peak. Stages stay as CONFIG
    has them: parallel.pp, schedule, chunks and split are not searched. It lists what fits, cheapest
    first, and says of each other layout why it does not. Status 1: nothing fits.

    `mpisim plan show CONFIG --ranks N` prints the plan, `--ops` all its ops; `mpisim plan check
    FILE` proves such a text of ops, also one that was edited.
    """


@plan.command("search")
@_config_argument
@_ranks_option("Ranks to plan for.", required=True)
@click.option(
    "--budget",
    type=_Size(),
    metavar="SIZE",
    help="What a rank may hold, like 256MiB; by default memory.budget_bytes.",
)
@click.option(
    "--precision",
    type=click.Choice(["keep", "if-needed", "any"]),
    default="if-needed",
    show_default=True,
    help="Whether 16-bit layouts count, which round otherwise: never, if nothing else fits, or "
    "always (listed last).",
)
@click.option("--no-data", is_flag=True, help="Leave out the data set's bytes: peaks are too low.")
@click.option(
    "--write",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the chosen config to a new file.",
)
@_set_option
@_json_option
def plan_search(
    config: Path,
    ranks: int,
    budget: int | None,
    precision: str,
    no_data: bool,
    write: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Search a layout of CONFIG on N ranks that fits a budget of memory.

    Stages stay as CONFIG has them: parallel.pp, schedule, chunks and split are not searched.
    """
    resolved = _load(config, overrides)
    from mpisim.planner import search_layouts, search_rows, search_text, write_config

    found = search_layouts(resolved, ranks, budget, precision=precision, with_data=not no_data)
    columns = None
    if sys.stdout.isatty():
        import shutil

        columns = shutil.get_terminal_size().columns
    _print_table(lambda: search_text(found, columns), lambda: search_rows(found), as_json)
    if found.chosen is None:
        return _FAILED
    command = f"mpisim train {config} --ranks {ranks} --set memory.budget_bytes="
    if write is not None:
        command = write_config(found, write)
    else:
        words = [f"--set {word}" for word in overrides]
        command += " ".join([str(found.budget_bytes), *words, found.chosen.options]).rstrip()
    if not as_json:
        unproven = " (without the data set, which may not fit)" if no_data else ""
        click.echo(f"run it{unproven}: {command}")
    return _DONE


@plan.command("show")
@_config_argument
@_ranks_option("Ranks to plan for.", required=True)
@click.option(
    "--ops", "only_ops", is_flag=True, help="Print the ops, as `plan check` reads them back."
)
@click.option(
    "--png",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw the plan into a picture, too (takes matplotlib).",
)
@_set_option
def plan_show(
    config: Path, ranks: int, only_ops: bool, png: Path | None, overrides: tuple[str, ...]
) -> None:
    """Print the plan of CONFIG on N ranks.

    With stages: which rank computes what when, what each stage holds, and what the schedule leaves
    idle. Without stages, or with --ops: all ops, one per line.
    """
    resolved = _load(config, overrides)
    from mpisim.train.overview import require_picture, view_plan, write_picture

    if png is not None:
        require_picture(png)
    view = view_plan(resolved, ranks)
    only_ops = only_ops or not view.overview
    click.echo((view.ops if only_ops else view.overview).rstrip("\n"))
    if png is not None:
        write_picture(view, png)
        # What was printed must stay a plan text.
        click.echo(f"wrote {png}", err=only_ops)


@plan.command("check")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@_json_option
def plan_check(file: Path, as_json: bool) -> None:
    """Prove the plan in FILE, a text of `plan show --ops` that may have been edited.

    An edit that breaks it is refused with the line, or with the op and the number that is wrong.
    """
    from mpisim.planner import check_plan_file

    result = check_plan_file(file)
    _print_table(result.text, result.rows, as_json)


@cli.command()
@_run_argument
@_json_option
def report(run: Path, as_json: bool) -> None:
    """Print what the run directory RUN says: speed, bytes, stalls, memory."""
    from mpisim.report import report_rows, report_text

    _print_table(lambda: report_text(run), lambda: report_rows(run), as_json)


@cli.command()
@click.argument("first", type=_RunDirectory(), metavar="RUN")
@click.argument("second", type=_RunDirectory(), metavar="RUN")
@_json_option
def compare(first: Path, second: Path, as_json: bool) -> None:
    """Show two runs side by side: config, curves, bytes, memory, time.

    The last lines say whether their losses and weights are the same bits.
    """
    from mpisim.report.compare import compare_rows, compare_text

    _print_table(lambda: compare_text(first, second), lambda: compare_rows(first, second), as_json)


@cli.command()
@_run_argument
@click.option("--prompt", default="", metavar="TEXT", help="Text to go on from; by default none.")
@click.option(
    "--tokens",
    type=click.IntRange(min=0),
    default=200,
    show_default=True,
    metavar="N",
    help="Bytes to write at most.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.8,
    show_default=True,
    help="Above 1: more varied; 0: always the most probable byte.",
)
@click.option(
    "--top-k",
    type=click.IntRange(min=0),
    default=40,
    show_default=True,
    metavar="K",
    help="Choose among the K most probable bytes; 0: all.",
)
@click.option(
    "--extensions", is_flag=True, help="Run the files of run.extensions; only if you trust them."
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Same seed, same text.",
)
def sample(
    run: Path, prompt: str, tokens: int, temperature: float, top_k: int, seed: int, extensions: bool
) -> None:
    """Write text with the trained weights of RUN, until the model ends its document.

    Of a prompt that is longer than the model's context only the tail is seen.
    """
    from mpisim.launch import limit_blas_threads

    # Before NumPy: these products are too small to share, and so the bits are those of any machine.
    limit_blas_threads()
    from mpisim.train.sample import readable
    from mpisim.train.sample import sample as write

    text = write(
        run, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed, extensions=extensions
    )
    # Whatever the terminal's encoding lacks must not end in a traceback.
    shown = readable(prompt.encode("utf-8", "surrogateescape") + text)
    click.echo(shown.encode(sys.stdout.encoding or "utf-8", "replace"))


@cli.command()
@_run_argument
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write all of them to one safetensors file.",
)
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@_json_option
def weights(run: Path, out: Path | None, overwrite: bool, as_json: bool) -> None:
    """List the trained weights of RUN, by stage, and verify stage files by their sha256."""
    from mpisim.train.stage_reader import open_weights, weights_rows, weights_text, write_whole

    with open_weights(run) as reader:
        if out is not None:
            write_whole(reader, out, overwrite=overwrite)
        reader.verify()
        _print_table(lambda: weights_text(reader), lambda: weights_rows(reader), as_json)
    if out is not None and not as_json:
        click.echo(f"wrote {out}")


@cli.group()
def trace() -> None:
    """Turn traces into the formats of other tools."""


@trace.command("export")
@_run_argument
@click.option("--format", "form", type=click.Choice(["perfetto"]), default="perfetto")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write; by default RUN/perfetto.json.",
)
@click.option(
    "--steps",
    type=_Steps(),
    metavar="FIRST:END",
    help="Only these steps, like 100:110 (END left out); by default all.",
)
def trace_export(run: Path, form: str, out: Path | None, steps: tuple[int, int] | None) -> None:
    """Write the trace of RUN for a viewer (Chrome JSON)."""
    from mpisim.report import export_perfetto

    out = out or run / "perfetto.json"
    export_perfetto(run, out, steps)
    click.echo(f"wrote {out}")


@cli.group()
def bench() -> None:
    """Measure against the MPI library and PyTorch, interleaved in the same run."""


_launches_option = click.option(
    "--launches",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    metavar="K",
    help="Independent starts; figures are medians over them.",
)


@bench.command("collectives")
@_ranks_option("Ranks to start.", required=True)
@_launches_option
@click.option("--sizes", type=_Sizes(), metavar="LIST", help="Message sizes, like 1KiB,64KiB,4MiB.")
@_json_option
def bench_collectives(
    ranks: int, launches: int, sizes: tuple[int, ...] | None, as_json: bool
) -> int:
    """Time the rings beside the library's collectives and a memory copy."""
    from mpisim.bench import bench_collectives as measure

    return _print_bench(measure(ranks=ranks, launches=launches, sizes=sizes), as_json)


@bench.command("trace")
@_ranks_option("Ranks to start.", required=True)
@_json_option
def bench_trace(ranks: int, as_json: bool) -> int:
    """Time a training step with tracing on and off."""
    from mpisim.bench import bench_trace as measure

    return _print_bench(measure(ranks=ranks), as_json)


@bench.command("step")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Ranks to start; more than one: beside PyTorch's DDP.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float64", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Dtype of activations and working weights.",
)
@click.option(
    "--kernels",
    type=click.Choice(["auto", "numpy", "numba"]),
    default="auto",
    show_default=True,
    help="Who computes our element-wise work.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=15,
    show_default=True,
    metavar="K",
    help="Rounds to keep; in each, every side makes one update.",
)
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    metavar="B",
    help="Rows of a rank.",
)
@_set_option
@_json_option
def bench_step(as_json: bool, **options: Any) -> int:
    """Time a training step of the decoder beside the same in PyTorch.

    The model and all else are fields of a run config: --set model.d_model=128.
    """
    from mpisim.bench import bench_step as measure

    return _print_bench(measure(**options), as_json)


@cli.group()
def demo() -> None:
    """Worked examples that are small enough to follow by hand."""


@demo.command("accumulation")
@click.option(
    "--rows",
    type=int,
    default=2,
    show_default=True,
    metavar="1|2|3",
    help="Rows of a microbatch at most.",
)
def demo_accumulation(rows: int) -> int:
    """Accumulate three short texts in microbatches; print one JSON record.

    It shows that accumulation and recompute change nothing, and what an overflow leaves behind.
    """
    import json

    from mpisim.train.worked import accumulation_record

    print(json.dumps(accumulation_record(rows), indent=1))
    return 0


def _complete_page(_ctx: Any, _param: Any, incomplete: str) -> list[str]:
    from mpisim.reproduce import PAGES

    return [name for name in (*PAGES, "all") if name.startswith(incomplete)]


@cli.command()
@click.argument("name", metavar="NAME", shell_complete=_complete_page)
@_json_option
def reproduce(name: str, as_json: bool) -> int:
    """Print a published table beside ours: published, ours, difference.

    NAME is zero-table1, zero-table2, korthikanti, playbook, estimators, busbw, bubbles, or all.
    The exit status is 1 if a value of ours does not agree.
    """
    from mpisim.reproduce import reproduce as compare_with_published

    result = compare_with_published(name)
    _print_table(lambda: result.text, lambda: result.rows, as_json)
    return _FAILED if result.num_wrong else _DONE


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a SHELL.

    For bash: mpisim completion bash > ~/.mpisim-complete, and source that file.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise ConfigError(f"shell must be bash, zsh or fish; got {shell}. Choose one of these.")
    # Written out, not asked of click's source(): that starts the shell to look at its version.
    made = kind(cli, {}, "mpisim", "_MPISIM_COMPLETE")
    click.echo(made.source_template % made.source_vars())


def _load(path: Path, overrides: Iterable[str]) -> Any:
    from mpisim.config import load_config

    return load_config(path, overrides)


def _split(flags: str) -> list[str]:
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise ConfigError(
            f"--mpi-args must be words as in a shell; got {flags!r} ({error}). Close its quotes."
        ) from None


def _print_bench(result: Any, as_json: bool) -> int:
    if result.status == _DONE:
        _print_table(lambda: result.text, lambda: result.rows, as_json)
    return result.status


def _print_table(
    text: Callable[[], str], rows: Callable[[], Iterable[Mapping[str, Any]]], as_json: bool
) -> None:
    """Print a table as text, or its rows as a JSON list with one row a line."""
    if not as_json:
        click.echo(text().rstrip("\n"))
        return
    lines = [json.dumps(row, allow_nan=False) for row in rows()]
    click.echo("[\n" + ",\n".join(lines) + "\n]")
