"""The import hook of pose_plugin, which torch installs when it is imported (entry point `torch.backends`).

A module next to the package, which imports nothing of it: a package that cannot be imported (a checkout in the middle
of a merge, a half-written upgrade) must never break `import torch`. When a module that pose_plugin completes is
imported, `pose_plugin._autoload` patches it; see there. Off with TORCH_DEVICE_BACKEND_AUTOLOAD=0.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The modules that `pose_plugin._autoload.PATCHES` has a function for.
WAITING = (
    "axolotl.cli.merge_lora",
    "axolotl.cli.plugins",
    "axolotl.integrations.base",
    "axolotl.utils.config",
    "peft.config",
    "peft.peft_model",
)


def install() -> None:
    """Add the hook, or patch modules at once that are imported already. Never raises."""
    try:
        waiting = [name for name in WAITING if name not in sys.modules]
        if waiting and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(waiting))
        for name in WAITING:
            if name in sys.modules:
                _patch(sys.modules[name])
    except Exception:
        # torch would raise it again from `import torch`. Without the hook, `plugins: [pose_plugin.PosePlugin]` works.
        return


def _patch(module: ModuleType) -> None:
    """Patch a module. A package that cannot be imported raises where it is used, not from another one's import."""
    try:
        importlib.import_module("pose_plugin._autoload").PATCHES[module.__name__](module)
    except Exception:
        return


class _Finder:
    """Finds nothing itself; lets a patch follow the execution of the modules it waits for."""

    def __init__(self, waiting: Iterable[str]) -> None:
        self.waiting = set(waiting)
        self._looking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.waiting or getattr(self._looking, "now", False):
            return None
        # The other finders are asked through the same list, so this one must not answer a second time.
        self._looking.now = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
        return spec

    def imported(self, module: ModuleType) -> None:
        # Only now: a spec may be asked for without being imported.
        self.waiting.discard(module.__name__)
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)
        _patch(module)


class _Loader:
    """The module's own loader, and the patch after it."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._finder.imported(module)
