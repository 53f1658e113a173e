"""The style of all figures. Importing this file does not import matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pose_plugin.utils.errors import PoSEError, pip_install
from pose_plugin.utils.files import atomic_file

# The palette of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555", "#000000")
# Any, because matplotlib's type for it lists the literal keys.
STYLE: Any = {
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.edgecolor": "#444444",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "figure.dpi": 200,
    "savefig.bbox": "tight",
    "savefig.pad_inches": 0.05,
    # With a fixed seed of its ids, and without a date, an SVG of the same figure has the same bytes.
    "svg.hashsalt": "pose-plugin",
}


def require_matplotlib(otherwise: str = "figures=False") -> None:
    """Raise PoSEError if matplotlib is not installed.

    Args:
        otherwise: what leaves the figures out, for the message.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PoSEError(
            f"figures need matplotlib, which is not installed: {pip_install('plot')}, or leave them out: {otherwise}"
        ) from None


@contextmanager
def new_figure(path: Path, size: tuple[float, float], *more: Path) -> Iterator[Any]:
    """Yield an empty figure of matplotlib, and write it atomically when the block ends.

    No global state of matplotlib changes.

    Args:
        path: the file; its ending selects the format.
        size: width and height in inches.
        more: files for the same figure.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        for file in (path, *more):
            with atomic_file(file) as part:
                figure.savefig(part, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)


def check_ending(path: Path) -> None:
    """Raise PoSEError if the file name's ending is not a format of figures."""
    known = (".png", ".svg", ".pdf")
    if path.suffix.lower() not in known:
        raise PoSEError(f"the figure {path} must end in one of {', '.join(known)}")


def tokens(length: int) -> str:
    """Return a length for an axis: 2048 as 2k, 512 and 5000 as they are."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)
