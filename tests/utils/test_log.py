from __future__ import annotations

import io
import logging
import sys

import pytest

from pose_plugin.utils.log import log, show_log


@pytest.fixture
def fresh():
    """Reset the logger to its state before any run, and restore it after the test."""
    before = log.handlers[:], log.level, log.propagate
    log.handlers, log.propagate = [], True
    log.setLevel(logging.NOTSET)
    yield
    log.handlers, log.level, log.propagate = before


def test_messages_go_to_the_current_stderr(fresh, monkeypatch):
    """Notebooks and test runners replace it."""
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    show_log()
    log.info("one")
    monkeypatch.setattr(sys, "stderr", second)
    show_log()
    log.info("two")
    assert (first.getvalue(), second.getvalue()) == ("[pose_plugin] one\n", "[pose_plugin] two\n")


def test_the_callers_configuration_is_kept(fresh):
    mine = logging.NullHandler()
    log.addHandler(mine)
    log.setLevel(logging.ERROR)
    show_log()
    assert log.handlers == [mine] and log.level == logging.ERROR
