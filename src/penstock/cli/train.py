"""`penstock train` runs a training from a YAML file, `penstock plot` draws its plots; also `penstock scenario`."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.common import Interrupted, check_engine, check_port, only_one, require_extra, run_until_signal

_NEEDED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_NAMES = _NEEDED | {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"}
_PREFIXES = ("GROUP_", "ROLE_", "TORCHELASTIC_")
"""Names and prefixes of the variables that torchrun sets."""


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values instead of the file's.", show_default=False)
    ] = None,
    *,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with this run from its last checkpoint.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete an earlier run of this name first.")] = False,
) -> None:
    """Train a model with rollouts from a fleet of engines, updated while they generate.

    **Examples**

    - `penstock train examples/DEMO.yaml`
    - `penstock train examples/DEMO.yaml seed=1 train.steps=40 fleet.engines=4`
    - `penstock train examples/DEMO.yaml --resume` (after a crash or Ctrl-C)
    - `penstock train examples/DEMO.yaml train.ranks=2` (the learner as two processes)
    - `penstock train examples/DEMO.yaml --fresh` (once more from the start, under the same name)

    The run folder, `run_dir`/`name`, holds the resolved config, metrics.jsonl, summary.json, plots, and sample
    trajectories (docs/reference/run-folder.md). Keys and their meaning: docs/reference/configuration.md.
    """
    from penstock.errors import PenstockError  # noqa: PLC0415

    sys.path.append(str(Path.cwd()))  # for the user's own environment or loss, on every rank
    launched = take_launched(os.environ)
    failed = partial(_report_failure, launched)
    if int(launched.get("RANK", "0")):
        from penstock.train.ranks import follow  # noqa: PLC0415 - seconds: torch

        raise typer.Exit(follow(launched, failed))
    try:
        folder = _run_here(config, overrides or [], launched, resume=resume, fresh=fresh)
    except PenstockError as error:
        failed(str(error))
        raise
    typer.echo(f"run folder: {folder} (read trajectories.md, look at plots.png)")


def take_launched(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Take torchrun's variables out of the environment; empty if torchrun did not start this process.

    Engines start with the remaining variables. With torchrun's, vLLM would take itself for a rank of the learner.
    """
    if not environment.keys() >= _NEEDED:
        return {}
    ours = [name for name in environment if name in _NAMES or name.startswith(_PREFIXES)]
    return {name: environment.pop(name) for name in ours}


def _report_failure(launched: Mapping[str, str], message: str) -> None:
    """Make torchrun show why this process ended, at the end of its output."""
    if file := launched.get("TORCHELASTIC_ERROR_FILE"):
        shown = {"py_callstack": message, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": shown}}))


def _run_here(
    config: Path, overrides: Sequence[str], launched: Mapping[str, str], *, resume: bool, fresh: bool
) -> Path:
    """Train after the checks that need no slow imports. Return the run folder."""
    from penstock.config import load_config  # noqa: PLC0415
    from penstock.fleet.fleet import FleetStoppedError  # noqa: PLC0415
    from penstock.observe.progress import RunDisplay  # noqa: PLC0415
    from penstock.observe.run_folder import CONFIG, RunFolder  # noqa: PLC0415

    only_one(resume=resume, fresh=fresh)
    settings = load_config(config, overrides)
    folder = settings.run_dir / settings.name
    require_extra("train", "torch", "transformers", "safetensors", "matplotlib")
    steps = settings.train.steps
    if resume and not launched and RunFolder.open(folder).has_ended(settings):
        typer.echo(f"{folder} has made all of its {steps} steps; give a larger train.steps for more")
        return folder
    check_port(settings.router.host, settings.router.port)
    if settings.fleet.engines:  # attached engines have their own device and model
        check_engine(settings.engine)
    try:
        with RunDisplay(settings.name, settings.train.steps) as display:
            from penstock.train.run import run  # noqa: PLC0415 - seconds: torch

            run_until_signal(run(settings, resume=resume, fresh=fresh, reporter=display, launched=launched))
    except (Interrupted, FleetStoppedError):
        from penstock.train.checkpoint import latest_step  # noqa: PLC0415

        command = shlex.join(["penstock", "train", str(config), *overrides, "--resume"])
        if latest_step(folder):
            typer.echo(f"interrupted; {folder} goes on from its last checkpoint with: {command}", err=True)
        elif (folder / CONFIG).exists():
            typer.echo(f"interrupted before the first checkpoint; {folder} starts again with: {command}", err=True)
        else:
            typer.echo("interrupted before the run began", err=True)
        raise
    return folder


def plot(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders that `penstock train` wrote.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Picture; default: RUN/plots.png, for several comparison.png beside the first."),
    ] = None,
) -> None:
    """Draw the plots of a run, or of several runs that it compares, in one picture.

    Unfinished runs are drawn up to their last step. A single run also gets its trace written.

    **Examples**

    - `penstock plot runs/demo`
    - `penstock plot runs/sync runs/async --out schedules.png`
    """
    require_extra("train", "matplotlib")
    from penstock.observe.plots import draw_plots  # noqa: PLC0415
    from penstock.observe.run_folder import RunFolder  # noqa: PLC0415

    folders = [RunFolder.open(run) for run in runs]
    file = out or (runs[0] / "plots.png" if len(runs) == 1 else runs[0].resolve().parent / "comparison.png")
    draw_plots(folders, file)
    typer.echo(str(file))
    if len(folders) == 1:
        typer.echo(str(folders[0].write_trace()))


scenario = typer.Typer(
    name="scenario", help="Run the scenarios of the plan, each with its own checklist.", invoke_without_command=True
)


@scenario.command("list")
def list_scenarios() -> None:
    """Show every scenario and its requirements."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from penstock.train.scenarios.table import SCENARIOS, needs  # noqa: PLC0415

    table = Table("name", "what", "needs", box=None)
    for each in SCENARIOS.values():
        table.add_row(each.name, each.what, needs(each) + (f", and {each.missing}" if each.missing else ""))
    Console().print(table)


@scenario.command("run")
def run_one(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of `penstock scenario list`.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Values instead of the scenario's.", show_default=False),
    ] = None,
    *,
    cpu: Annotated[bool, typer.Option("--cpu", help="Engines of vLLM's CPU build.")] = False,
    sim: Annotated[bool, typer.Option("--sim", help="Simulated engines: the logic alone, nothing is learned.")] = False,
    model: Annotated[Path, typer.Option(help="Folder of the policy.")] = Path("examples/models/sorter-0.8m"),
    data: Annotated[Path | None, typer.Option(help="gsm8k: a folder of GSM8K's shape; default: a stand-in.")] = None,
    run_dir: Annotated[Path, typer.Option(help="Parent of run folders; scenarios.jsonl is written there.")] = Path(
        "runs/scenarios"
    ),
) -> None:
    """Run one scenario and check it. Print one row; exit with status 1 if a check fails.

    **Examples**

    - `penstock scenario run async --cpu`
    - `penstock scenario run lora --cpu train.steps=10` (a shorter run gains less)
    """
    require_extra("train", "torch", "transformers", "safetensors", "matplotlib")
    from penstock.errors import UserError  # noqa: PLC0415
    from penstock.train.scenarios.table import check_machine, scenario_named  # noqa: PLC0415

    profile = only_one(cpu=cpu, sim=sim) or "gpu"
    chosen = scenario_named(name)
    if data is not None and name != "gsm8k":
        raise UserError(f"--data is of the scenario gsm8k; {name} makes its own tasks")
    gpus = check_machine(chosen, profile)
    config = chosen.config(profile=profile, run_dir=run_dir, model=model, overrides=overrides or [], gpus=gpus)
    check_engine(config.engine)
    from penstock.train.scenarios.run import run_scenario  # noqa: PLC0415 - seconds: torch

    result = run_until_signal(run_scenario(chosen, config, data=data))
    typer.echo(result.row())
    raise typer.Exit(0 if result.ok else 1)
