"""Style of every figure of the package. Importing this file does not import matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pose_plugin.utils.errors import PoSEError

# Okabe & Ito's colours stay apart for colour-blind readers, and markers in black and white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555", "#000000")
# Any: matplotlib types the keys one by one.
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
}


def require_matplotlib() -> None:
    """Raises PoSEError, with the way out, where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PoSEError(
            'figures need matplotlib, which is not installed; pip install "pose-plugin[plot]", or do without '
            "them: figures=False, on the command line --no-figures"
        ) from None


def check_ending(path: Path) -> None:
    """Raises PoSEError where no figure can be written in the format that the ending asks for."""
    known = (".png", ".svg", ".pdf")
    if path.suffix.lower() not in known:
        raise PoSEError(f"the figure {path} must end in one of {', '.join(known)}")


def tokens(length: int) -> str:
    """2048 as 2k, 512 and 5000 as they are."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)
