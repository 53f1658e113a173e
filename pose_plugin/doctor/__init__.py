"""Find out why a model or adapter folder, or a running server, does not use the long window that it should."""

from __future__ import annotations

from pose_plugin.doctor.checks import CHECKS, diagnose
from pose_plugin.doctor.folder import Folder, Problem, read_folder

__all__ = ["CHECKS", "Folder", "Problem", "diagnose", "read_folder"]
