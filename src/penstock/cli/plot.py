"""`penstock plot`: the plots of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.checks import require_extra


def plot(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder that `penstock train` wrote.", show_default=False)],
) -> None:
    """Draw the plots of a run as PNG files into RUN/plots; of a run under way, as far as it has come.

    **Examples**

    - `penstock plot runs/demo`
    """
    require_extra("train", "matplotlib")
    from penstock.observe.plots import draw_plots  # noqa: PLC0415
    from penstock.observe.run_folder import RunFolder  # noqa: PLC0415

    for file in draw_plots(RunFolder.open(run)):
        typer.echo(str(file))
