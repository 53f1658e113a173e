"""The tasks: one file each, with `forecast` and `make`. A new one is a file, a line here, and its name in settings."""

from __future__ import annotations

from types import ModuleType

from pose_plugin.synthesize.tasks import biography, compare, multi, single

MODULES: dict[str, ModuleType] = {"single": single, "multi": multi, "compare": compare, "biography": biography}
