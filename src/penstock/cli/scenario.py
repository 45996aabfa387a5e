"""`penstock scenario`: the scenarios of the plan, each with its own checklist."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.common import check_engine, require_extra, run_until_signal

scenario = typer.Typer(
    name="scenario", help="Run the scenarios of the plan, each with its own checklist.", invoke_without_command=True
)


@scenario.command("list")
def list_scenarios() -> None:
    """Show every scenario, with what it needs."""
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
    """Run one scenario and check it: one row, exit status 1 where a check fails.

    **Examples**

    - `penstock scenario run async --cpu`
    - `penstock scenario run lora --cpu train.steps=10` (a shorter run gains less)
    """
    require_extra("train", "torch", "transformers", "safetensors", "matplotlib")
    from penstock.errors import UserError  # noqa: PLC0415
    from penstock.train.scenarios.table import check_machine, scenario_named  # noqa: PLC0415

    if cpu and sim:
        raise UserError("--cpu and --sim are two kinds of engines; give one of them")
    profile = "cpu" if cpu else "sim" if sim else "gpu"
    chosen = scenario_named(name)
    gpus = check_machine(chosen, profile)
    config = chosen.config(profile=profile, run_dir=run_dir, model=model, overrides=overrides or [], gpus=gpus)
    check_engine(config.engine)
    from penstock.train.scenarios.run import run_scenario  # noqa: PLC0415 - seconds: torch

    result = run_until_signal(run_scenario(chosen, config, data=data))
    typer.echo(result.row())
    raise typer.Exit(0 if result.ok else 1)
