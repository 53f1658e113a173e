"""Where the chunks of a training window are put: one file per sampler, one entry each in `SAMPLERS`.

Which distances each one trains (`coverage` measures it for any settings):
- `pose`: everything below the longest chunk in each row; each farther distance with about equal chance, except the
  last L_c before the target, which fade to nothing (`target_margin` moves that edge outwards). With more than two
  chunks the skips still grow one after the other, so the first jumps tend to be the widest.
- `clamped`: the farthest distances as often as the others, and a share of rows stays plain.
- `randpos`: all distances, but hardly any two neighbouring tokens at distance 1.
- `cream`: the tail is always at the end of the target, so the distances to it are trained most.
- `turns`: as `pose`, with jumps only between the turns of a chat.
- `sentences`: a jump after every sentence; near distances beyond a sentence are rarer than with `pose`.
- `none`: 1…n−1 only.
"""

from __future__ import annotations

from pose_plugin.positions.samplers.base import BorderFinder, Borders, Row, Sampler
from pose_plugin.positions.samplers.clamped import Clamped
from pose_plugin.positions.samplers.cream import Cream
from pose_plugin.positions.samplers.plain import Plain
from pose_plugin.positions.samplers.pose import Pose
from pose_plugin.positions.samplers.randpos import RandPos
from pose_plugin.positions.samplers.sentences import Sentences
from pose_plugin.positions.samplers.turns import Turns
from pose_plugin.positions.settings import PositionSettings

SAMPLERS: dict[str, type[Sampler]] = {
    each.name: each for each in (Pose, Clamped, RandPos, Cream, Turns, Sentences, Plain)
}


def make_sampler(settings: PositionSettings) -> Sampler:
    """Return the sampler that the settings name, with the settings that it reads."""
    kind = SAMPLERS[settings.sampler]
    return kind(**{option: getattr(settings, option) for option in kind.options()})


def unread_options(sampler: str) -> set[str]:
    """Return the options of other samplers that a sampler does not have.

    `unskipped_ratio` and `target_margin` are not options of samplers: a config that compares PoSE with `sampler: none`
    may keep both.
    """
    kind = SAMPLERS[sampler]
    every = {option for each in SAMPLERS.values() for option in each.options()}
    return every - set(kind.options())


def names_with(option: str) -> list[str]:
    """Return the samplers that read a setting."""
    return [name for name in SAMPLERS if option not in unread_options(name)]


__all__ = [
    "SAMPLERS",
    "BorderFinder",
    "Borders",
    "Row",
    "Sampler",
    "make_sampler",
    "names_with",
    "unread_options",
]
