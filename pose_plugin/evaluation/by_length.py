"""A measure length by length, while training: what does not fit in memory is left out, and the rest is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pose_plugin.evaluation.memory import TooLittleMemory, fitting
from pose_plugin.evaluation.model import device_of
from pose_plugin.evaluation.sharded import InStep
from pose_plugin.utils.log import log


class ByLength:
    """Measures the lengths one by one, the shortest first, up to the first one that does not fit.

    Which lengths are left out is said once, not at every measurement. They are tried again each time, as memory may
    come back.

    Args:
        name: of the measure, for the warning.
        lengths: in tokens.
        measure: of (model, tokenizer, length).
        result: the class of what it returns, with `joined`; needed by a call.
    """

    def __init__(
        self, name: str, lengths: Sequence[int], measure: Callable[[Any, Any, int], Any], result: Any = None
    ) -> None:
        self.name, self.lengths = name, sorted(set(lengths))
        self.measure, self.result = measure, result
        self._said: set[int] = set()

    def __call__(self, model: Any, tokenizer: Any) -> Any:
        """The lengths that fit, as one result.

        Raises:
            TooLittleMemory: see `parts`.
        """
        parts = list(self.parts(model, tokenizer).values())
        return parts[0] if len(parts) == 1 else self.result.joined(parts)

    def parts(self, model: Any, tokenizer: Any) -> dict[int, Any]:
        """The result of each length that fits.

        Raises:
            TooLittleMemory: not even the shortest does; or memory ran out half-way, and other ranks would wait.
        """
        found: dict[int, Any] = {}
        for n in self.lengths:
            try:
                # Before a million prompts are made that no memory could read.
                fitting(model, device_of(model), n, 1)
                found[n] = self.measure(model, tokenizer, n)
            except TooLittleMemory as error:
                others_wait = isinstance(model, InStep) and isinstance(error.__cause__, torch.OutOfMemoryError)
                if others_wait or not found:
                    raise
                self._say([m for m in self.lengths if m >= n], error)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                # Longer ones need more.
                break
        return found

    def _say(self, left_out: list[int], error: TooLittleMemory) -> None:
        if not self._said.issuperset(left_out):
            listed = ", ".join(map(str, left_out))
            log.warning("%s is not measured at %s, the rest is: %s", self.name, listed, error)
        self._said.update(left_out)
