"""Position ids and content of training windows: pure maths on arrays, without torch or any framework."""

from pose_plugin.positions.coverage import Coverage, coverage, many_chunks, simulable
from pose_plugin.positions.draws import Draws, document_generator
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers import SAMPLERS, Borders, Rows, Sampler, make_sampler
from pose_plugin.positions.windows import Window, draw_windows, plain_window

__all__ = [
    "SAMPLERS",
    "Borders",
    "Coverage",
    "Draws",
    "Layout",
    "Rows",
    "Sampler",
    "Window",
    "coverage",
    "document_generator",
    "draw_windows",
    "make_sampler",
    "many_chunks",
    "plain_window",
    "simulable",
]
