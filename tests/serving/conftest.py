"""Warnings of ours are printed in this process here, and other tests look at what runs print."""

from __future__ import annotations

import pytest

from pose_plugin.log import log


@pytest.fixture(autouse=True)
def log_as_before():
    level, handlers, propagate = log.level, list(log.handlers), log.propagate
    yield
    log.setLevel(level)
    log.handlers[:] = handlers
    log.propagate = propagate
