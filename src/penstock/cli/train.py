"""`penstock train`: a training run from a YAML file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.checks import check_engine, check_port, require_extra
from penstock.cli.signals import Interrupted, run_until_signal


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
    - `penstock train examples/DEMO.yaml --fresh` (once more from the start, under the same name)

    The run folder, `run_dir`/`name`, holds the resolved config, metrics.jsonl, summary.json, plots, and sample
    trajectories. What each key means: docs/configuration.md.
    """
    from penstock.config import load_config  # noqa: PLC0415

    settings = load_config(config, overrides or [])
    require_extra("train", "torch", "transformers", "safetensors", "matplotlib")
    check_port(settings.router.host, settings.router.port)
    check_engine(settings.engine)
    sys.path.append(str(Path.cwd()))  # for an environment of one's own
    from penstock.observe.progress import RunDisplay  # noqa: PLC0415

    with RunDisplay(settings.name, settings.train.steps) as display:
        from penstock.train.run import run  # noqa: PLC0415 - seconds: torch

        try:
            run_until_signal(run(settings, resume=resume, fresh=fresh, reporter=display))
        except Interrupted:
            typer.echo("interrupted; with --resume the same command goes on from the last checkpoint", err=True)
            raise
    folder = settings.run_dir / settings.name
    typer.echo(f"run folder: {folder} (read trajectories.md, look at plots/)")
