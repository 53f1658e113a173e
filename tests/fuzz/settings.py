"""How much the tests of this folder try: generated inputs, the same ones in every run.

    POSE_FUZZ_EXAMPLES=2000 pytest tests/fuzz       # a long search
    POSE_FUZZ_SEED=7 pytest tests/fuzz              # other inputs

Without these variables each test tries few inputs, and the whole folder takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, seed, settings

EXAMPLES = int(os.environ.get("POSE_FUZZ_EXAMPLES", "40"))
SEED = os.environ.get("POSE_FUZZ_SEED")


def fuzz(test: Any = None, *, cost: int = 1) -> Any:
    """Decorate a hypothesis test, above `@given`: `@fuzz`, or `@fuzz(cost=10)` for one that runs a model.

    Args:
        test: the test, if the decorator is written without arguments.
        cost: how many times an input costs as much as a usual one (a millisecond); it divides the number of inputs.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        limited = settings(
            max_examples=max(1, EXAMPLES // cost),
            derandomize=SEED is None,
            # Failures must not depend on the machine's speed, nor on what an earlier run has stored.
            deadline=None,
            database=None,
            # Fixtures of a test serve all its inputs: a test must not expect an empty `tmp_path`.
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        )(test)
        return limited if SEED is None else seed(int(SEED))(limited)

    return decorate(test) if test is not None else decorate
