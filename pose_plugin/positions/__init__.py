"""Position ids and content of training windows: pure maths on arrays, knows no framework."""

from pose_plugin.positions.borders import TurnTokens, turn_borders
from pose_plugin.positions.coverage import Coverage, coverage, simulable
from pose_plugin.positions.draws import Draws, document_generator
from pose_plugin.positions.layout import Layout
from pose_plugin.positions.samplers.basic import BORDERED, SAMPLERS, WITHOUT_CHUNKS
from pose_plugin.positions.samplers.bordered import Borders
from pose_plugin.positions.windows import Window, draw_windows, plain_window

__all__ = [
    "BORDERED",
    "SAMPLERS",
    "WITHOUT_CHUNKS",
    "Borders",
    "Coverage",
    "Draws",
    "Layout",
    "TurnTokens",
    "Window",
    "coverage",
    "document_generator",
    "draw_windows",
    "plain_window",
    "simulable",
    "turn_borders",
]
