"""Findings: what a base, a folder or a run will do that its user may not expect, in one form for all reports."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pose_plugin.utils.log import log

Severity = Literal["info", "warning", "error"]
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


@dataclass(frozen=True)
class Finding:
    """One fact that changes what a user gets.

    Attributes:
        key: the config key or setting that it comes from, e.g. "sliding_window".
        value: its value; None if it is missing, "" if the finding is about the whole key or file.
        happens: what follows from it, as a sentence without a full stop.
        fix: what to do, as a sentence without a full stop; empty if nothing needs to be done.
        severity: "info" if it is as it should be, "warning" for a likely mistake, "error" if it cannot work.
    """

    key: str
    value: Any
    happens: str
    fix: str = ""
    severity: Severity = "warning"

    def __str__(self) -> str:
        fix = f". {self.fix}" if self.fix else ""
        value = " is missing" if self.value is None else f"={self.value}" if self.value != "" else ""
        return f"{self.key}{value}: {self.happens}{fix}"


def report(findings: Iterable[Finding], prefix: str = "", least: Severity = "info") -> None:
    """Log findings at the level of their severity.

    Args:
        findings: what to log.
        prefix: written before each, e.g. "rope: ".
        least: findings of a lower severity are left out.
    """
    for finding in findings:
        if _LEVELS[finding.severity] >= _LEVELS[least]:
            log.log(_LEVELS[finding.severity], "%s%s", prefix, finding)
