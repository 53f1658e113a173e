"""The tasks. Each is one file with `forecast` and `make`, a line here, and a name in settings.py."""

from __future__ import annotations

from types import ModuleType

from pose_plugin.synthesize.tasks import biography, compare, multi, single

MODULES: dict[str, ModuleType] = {"single": single, "multi": multi, "compare": compare, "biography": biography}
