"""Position ids and content of training windows: pure maths on arrays, without torch or any framework."""

from pose_plugin.positions.coverage import Coverage, affordable_draws, coverage, simulable, sketch, usual_distances
from pose_plugin.positions.draws import Draws
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers import SAMPLERS, Borders, Row, Sampler, make_sampler
from pose_plugin.positions.windows import Window, draw_windows, plain_window

__all__ = [
    "SAMPLERS",
    "Borders",
    "Coverage",
    "Draws",
    "Layout",
    "Row",
    "Sampler",
    "Window",
    "affordable_draws",
    "coverage",
    "draw_windows",
    "make_sampler",
    "plain_window",
    "simulable",
    "sketch",
    "usual_distances",
]
