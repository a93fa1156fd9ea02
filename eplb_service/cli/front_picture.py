"""The Pareto front as a picture: what balance costs in moves. Needs matplotlib (the extra `charts`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eplb_service.errors import EnvironmentFault, InvalidInputError
from eplb_service.policy.base import Proposal

SUFFIXES = (".svg", ".png", ".pdf")
PAPER, INK, FAINT = "#fbfbfa", "#24292f", "#d8dee4"
WORST, MEAN, PLAN = "#b35900", "#1f6feb", "#1a7f37"
DOTS_PER_INCH = 144


def check_picture(path: Path) -> None:
    """Before a plan is searched for: can its picture be written? Raises InvalidInputError or EnvironmentFault."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidInputError(f"{path} ends in {path.suffix or 'nothing'}; pictures are written as {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise InvalidInputError(f"there is no folder {path.parent} for the picture {path.name}")
    _pyplot()


def _pyplot() -> Any:
    """The chart library, drawing to files only."""
    try:
        import matplotlib as mpl  # noqa: PLC0415  # an extra

        mpl.use("Agg")
        import matplotlib.pyplot as plt  # noqa: PLC0415
    except ImportError as missing:
        raise EnvironmentFault(
            f"pictures need the Python package matplotlib, which is not installed here ({missing});"
            f" install eplb-service[charts], or give --pareto without a file for the table"
        ) from missing
    return plt


def draw_front(path: Path, proposal: Proposal, *, max_imbalance: float | None) -> None:
    """Write the front of a proposal: moves to the right, imbalance of the worst layer and mean over layers upwards.

    Raises InvalidInputError when the proposal has no front, EnvironmentFault when the file cannot be written.
    """
    if not proposal.front:
        raise InvalidInputError(f"policy {proposal.policy} gives no Pareto front; there is nothing to draw")
    plt, table = _pyplot(), proposal.placement
    title = f"{table.num_layers} layers x {table.num_logical} experts, {table.num_physical} slots on {table.num_ranks} ranks"
    moves = [point.moves.experts for point in proposal.front]
    lines = (
        ("worst layer", WORST, [point.predicted.worst for point in proposal.front], "o"),
        ("mean over layers", MEAN, [point.predicted.mean for point in proposal.front], "s"),
    )
    with plt.rc_context({"svg.hashsalt": "eplb", "font.size": 11, "font.family": "DejaVu Sans"}):
        figure, axes = plt.subplots(figsize=(7.6, 4.4), facecolor=PAPER, layout="constrained")
        axes.set_facecolor(PAPER)
        for name, colour, values, marker in lines:
            axes.plot(moves, values, marker=marker, markersize=4.5, linewidth=1.6, color=colour, label=name)
        _mark_plan(axes, proposal)
        _dress(axes, max_imbalance, lowest=min(lines[1][2]), highest=max(lines[0][2]))
        axes.set_title(title, loc="left", fontsize=11, color=INK, pad=10)
        axes.set_xlabel("experts moved", color=INK)
        axes.set_ylabel("imbalance (max / mean rank load)", color=INK)
        axes.legend(frameon=False, labelcolor=INK, loc="upper right")
        _save(figure, path)
        plt.close(figure)


def _mark_plan(axes: Any, proposal: Proposal) -> None:
    """A ring and a label at the point that the policy chose."""
    at, height = proposal.moves.experts, proposal.predicted.worst
    axes.plot(
        [at], [height], marker="o", markersize=12, markerfacecolor="none", markeredgewidth=2, color=PLAN, linestyle="none"
    )
    axes.annotate(
        f"the plan: {at:,} moves, worst layer {height:.4f}",
        (at, height),
        textcoords="axes fraction",
        xytext=(0.03, 0.06),  # below the front, which falls from the upper left
        color=PLAN,
        fontsize=10,
        arrowprops={"arrowstyle": "-", "color": PLAN, "linewidth": 1, "shrinkB": 7},
    )


def _dress(axes: Any, max_imbalance: float | None, *, lowest: float, highest: float) -> None:
    """Axes, grid, the target; logarithmic above 1 when the front spans much, so that its end can be read."""
    if max_imbalance is not None:
        axes.axhline(max_imbalance, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"target {max_imbalance:g}",
            (1, max_imbalance),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            color=INK,
            fontsize=9,
        )
    if lowest > 1.0 and (highest - 1.0) > 20 * (lowest - 1.0):
        axes.set_yscale("function", functions=(_above_one, _from_above_one))
        ticks = [
            value for value in (1.001, 1.002, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20) if value < 2 * highest
        ]
        axes.set_yticks([value for value in ticks if value > 1 + (lowest - 1) / 2], minor=False)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylim(1 + (lowest - 1) / 1.6, 1 + (highest - 1) * 1.6)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(color=FAINT, linewidth=0.8)
    axes.tick_params(colors=INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)


def _above_one(values: Any) -> Any:
    """Height on the axis: logarithm of what is above perfect balance."""
    import numpy as np  # noqa: PLC0415

    return np.log10(np.maximum(np.asarray(values) - 1.0, 1e-9))


def _from_above_one(heights: Any) -> Any:
    """The inverse."""
    import numpy as np  # noqa: PLC0415

    return 1.0 + np.power(10.0, np.asarray(heights))


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, facecolor=PAPER, dpi=DOTS_PER_INCH, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {error.strerror or error}") from error
