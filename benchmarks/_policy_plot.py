"""The cells of `policies.py` as two tables of colours for each size of fleet: every router against `bounded-sticky`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from _policy_cells import OURS
from matplotlib.colors import TwoSlopeNorm

Cells = Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]
"""Title, router, figure, `mean` and `stdev`."""
FIGURES = (
    ("tokens_per_s", "tokens/s of the batch (more is better)", False),
    ("p99_trajectory_s", "p99 trajectory time (less is better)", True),
)

DARK = -0.45
"""Shades under it are too dark for black digits."""


def draw(cells: Cells, file: Path) -> None:
    """Write the picture; its format is the file's suffix."""
    sizes = list(dict.fromkeys(title.rpartition(", ")[2] for title in cells))
    figure, axes = plt.subplots(
        len(sizes), len(FIGURES), figsize=(15, 5.4 * len(sizes)), squeeze=False, layout="constrained"
    )
    for row, size in enumerate(sizes):
        titles = [title for title in cells if title.endswith(f", {size}")]
        for column, (name, label, less_is_better) in enumerate(FIGURES):
            _panel(axes[row, column], cells, titles, name, less_is_better=less_is_better)
            axes[row, column].set_title(f"{label}, {size}", fontsize=11)
    figure.suptitle(f"{OURS} = 100; red is worse", fontsize=11)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _panel(axes: Any, cells: Cells, titles: list[str], name: str, *, less_is_better: bool) -> None:
    routers = [router for router in cells[titles[0]] if router != OURS]
    ratios = np.array(
        [[100 * cells[t][r][name]["mean"] / cells[t][OURS][name]["mean"] for t in titles] for r in routers]
    )
    shade = np.log(ratios / 100) * (-1 if less_is_better else 1)  # green: better than ours
    axes.imshow(shade, cmap="RdYlGn", norm=TwoSlopeNorm(0, -0.7, 0.35), aspect="auto")
    for (i, j), value in np.ndenumerate(ratios):
        colour = "white" if shade[i, j] < DARK else "black"
        axes.text(j, i, f"{value:.0f}", ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(len(titles)), [t.rpartition(", ")[0].replace(" ", "\n", 1) for t in titles], fontsize=8)
    axes.set_yticks(range(len(routers)), routers, fontsize=9)
