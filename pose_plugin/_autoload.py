"""Makes the literal `plugins: [pose_plugin]` work in Axolotl 0.19 and 0.20.

Those versions split a plugin's name at its last dot, so a name without a dot is a ValueError, and they have no
entry point for plugins. torch loads the entry points of the group `torch.backends` when it is imported; ours
leaves one import hook that acts when Axolotl's modules are imported, and is gone afterwards. Axolotl 0.21
finds the plugin by its own entry point and is left alone. Off with TORCH_DEVICE_BACKEND_AUTOLOAD=0; then
`plugins: [pose_plugin.PosePlugin]` works.

The same hook lets PEFT warn where an adapter of ours is put on a base without the extension, and load Beacon adapters
by their saved type; and Axolotl's merge-lora keep the extension where its YAML lacks the `pose:` block.

Nothing here may raise: torch would refuse to be imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "pose_plugin"
_DOTTED = "pose_plugin.PosePlugin"
_BEACON = "POSE_PLUGIN_BEACON"


def install() -> None:
    """Adds the import hook, or acts at once on modules that are imported already. Never raises."""
    try:
        waiting = {}
        for name, patch in _PATCHES.items():
            if name in sys.modules:
                patch(sys.modules[name])
            else:
                waiting[name] = patch
        if waiting and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(waiting))
    except Exception:
        # A plugin of a trainer is no reason for torch not to start; the dotted name still works.
        return


class _Finder:
    """Finds nothing itself; lets a patch follow the execution of the modules it waits for."""

    def __init__(self, waiting: dict[str, Callable[[ModuleType], None]]) -> None:
        self.waiting = waiting
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
        """Patches the module. Only now: a spec may be asked for without being imported."""
        patch = self.waiting.pop(module.__name__, None)
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)
        if patch is not None:
            patch(module)


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
        try:
            self._finder.imported(module)
        except Exception:
            return


def _accept_bare_name(base: ModuleType) -> None:
    """axolotl.integrations.base: `load_plugin("pose_plugin")` loads `pose_plugin.PosePlugin`."""
    if hasattr(base, "PLUGIN_ENTRY_POINT_GROUP") or getattr(base.load_plugin, "_pose_plugin", False):
        return
    load_plugin = base.load_plugin

    @functools.wraps(load_plugin)
    def load(plugin_name: str) -> Any:
        return load_plugin(_DOTTED if plugin_name == _NAME else plugin_name)

    load._pose_plugin = True  # type: ignore[attr-defined]
    base.load_plugin = load  # type: ignore[attr-defined]


def _notice_forgotten_line(config: ModuleType) -> None:
    """axolotl.utils.config: a `pose:` block without the plugin is an error; Axolotl would drop it silently."""
    if getattr(config.validate_config, "_pose_plugin", False):
        return
    validate_config = config.validate_config

    @functools.wraps(validate_config)
    def validate(cfg: Any, *args: Any, **kwargs: Any) -> Any:
        if cfg.get("pose") is not None and not any(str(p).startswith(_NAME) for p in cfg.get("plugins") or []):
            from pose_plugin.utils.errors import FORGOTTEN_LINE, PoSEError

            raise PoSEError(FORGOTTEN_LINE)
        return validate_config(cfg, *args, **kwargs)

    validate._pose_plugin = True  # type: ignore[attr-defined]
    config.validate_config = validate  # type: ignore[attr-defined]


def _complete_merges(merge_lora: ModuleType) -> None:
    """axolotl.cli.merge_lora: an adapter of ours keeps its extension where the YAML of the merge lacks our block."""
    merge = merge_lora.do_merge_lora
    if getattr(merge, "_pose_plugin", False):
        return

    @functools.wraps(merge)
    def do_merge_lora(*args: Any, cfg: Any, **kwargs: Any) -> Any:
        result = merge(*args, cfg=cfg, **kwargs)
        if cfg.get("pose"):
            return result  # the plugin's own part, which in Axolotl 0.19 comes after this
        merged = os.path.join(str(cfg.output_dir), "merged")
        adapter = str(cfg.get("lora_model_dir") or cfg.output_dir)
        if os.path.isfile(os.path.join(adapter, "pose.json")) and not os.path.exists(os.path.join(merged, "pose.json")):
            from pose_plugin.frameworks.axolotl_merge import complete_forgotten

            complete_forgotten(merged, adapter)
        return result

    do_merge_lora._pose_plugin = True  # type: ignore[attr-defined]
    merge_lora.do_merge_lora = do_merge_lora  # type: ignore[attr-defined]


def _notice_plain_bases(peft_model: ModuleType) -> None:
    """peft.peft_model: an adapter of ours that is put on a base without the extension is warned about."""
    owner = peft_model.PeftModel
    original = owner.__dict__["from_pretrained"].__func__
    if getattr(original, "_pose_plugin", False):
        return

    @functools.wraps(original)
    def from_pretrained(cls: type, model: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = original(cls, model, model_id, *args, **kwargs)
        # Whoever loads another adapter pays for this look at the disk and for nothing else.
        if os.path.isfile(os.path.join(str(model_id), "pose.json")):
            from pose_plugin.checkpoints.load import warn_of_plain_base

            warn_of_plain_base(loaded, model_id)
        return loaded

    from_pretrained._pose_plugin = True  # type: ignore[attr-defined]
    owner.from_pretrained = classmethod(from_pretrained)


def _make_beacons_known(config: ModuleType) -> None:
    """peft.config: a saved adapter of type POSE_PLUGIN_BEACON loads without an import of ours.

    Whoever loads another adapter pays for one comparison.
    """
    owner = config.PeftConfigMixin
    for name in ("_get_peft_type", "from_peft_type"):
        original = owner.__dict__[name].__func__
        if not getattr(original, "_pose_plugin", False):
            setattr(owner, name, classmethod(_knowing_beacons(original)))


def _knowing_beacons(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def known(cls: type, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("peft_type") == _BEACON:
            importlib.import_module("pose_plugin.beacon")
        found = original(cls, *args, **kwargs)
        if found == _BEACON:
            importlib.import_module("pose_plugin.beacon")
        return found

    known._pose_plugin = True  # type: ignore[attr-defined]
    return known


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "axolotl.integrations.base": _accept_bare_name,
    "axolotl.cli.merge_lora": _complete_merges,
    "axolotl.utils.config": _notice_forgotten_line,
    "peft.config": _make_beacons_known,
    "peft.peft_model": _notice_plain_bases,
}
