"""What the import hook of `pose_plugin_hook` patches in modules of Axolotl and PEFT, when they are imported.

- Axolotl 0.19 and 0.20 split a plugin's name at its last dot, so `plugins: [pose_plugin]` would be a ValueError. 0.21
  finds the plugin by its own entry point and is left alone.
- A `pose:` block without the plugin is an error; Axolotl would drop it silently.
- `axolotl train config.yaml --pose.target_length 4096` overrides a key; Axolotl would drop it silently too.
- Axolotl's merge-lora keeps the extension if its YAML lacks the `pose:` block.
- PEFT loads Beacon adapters by their saved type, and warns if an adapter with an extension is put on a plain base.

Each patch imports the rest of the package only if it is needed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

_NAME = "pose_plugin"
_DOTTED = "pose_plugin.PosePlugin"
_BEACON = "POSE_PLUGIN_BEACON"


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Call `around(original, …)` instead of a function, method or class method. A second call changes nothing."""
    found = inspect.getattr_static(owner, name)
    original = getattr(found, "__func__", found)
    if getattr(original, "_pose_plugin", False):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapped._pose_plugin = True  # type: ignore[attr-defined]
    setattr(owner, name, classmethod(wrapped) if isinstance(found, classmethod) else wrapped)


def _accept_bare_name(base: ModuleType) -> None:
    """axolotl.integrations.base: let `load_plugin("pose_plugin")` load `pose_plugin.PosePlugin`."""

    def load(load_plugin: Any, plugin_name: str) -> Any:
        return load_plugin(_DOTTED if plugin_name == _NAME else plugin_name)

    if not hasattr(base, "PLUGIN_ENTRY_POINT_GROUP"):
        _wrap(base, "load_plugin", load)


def _pass_overrides_on(plugins: ModuleType) -> None:
    """axolotl.cli.plugins: let commands pass options such as `--pose.target_length 4096` on to the config.

    `axolotl.cli.main`, which defines the commands, imports torch and thereby this hook while it is executed itself.
    """

    def get_command(original: Any, *args: Any) -> Any:
        from pose_plugin.frameworks.axolotl_overrides import pass_overrides_on

        return pass_overrides_on(original(*args))

    _wrap(plugins.PluginCommandGroup, "get_command", get_command)


def _notice_forgotten_line(config: ModuleType) -> None:
    """axolotl.utils.config: raise for a `pose:` block without the plugin."""

    def validate(validate_config: Any, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        asked = cfg.get("pose") is not None or any(str(key).startswith("pose.") for key in cfg)
        if asked and not any(str(p).startswith(_NAME) for p in cfg.get("plugins") or []):
            from pose_plugin.utils.errors import FORGOTTEN_LINE, PoSEError

            raise PoSEError(FORGOTTEN_LINE)
        return validate_config(cfg, *args, **kwargs)

    _wrap(config, "validate_config", validate)


def _complete_merges(merge_lora: ModuleType) -> None:
    """axolotl.cli.merge_lora: complete a merge whose YAML lacks the block that the adapter was trained with."""

    def do_merge_lora(merge: Any, *args: Any, cfg: Any, **kwargs: Any) -> Any:
        result = merge(*args, cfg=cfg, **kwargs)
        if cfg.get("pose"):
            return result  # The plugin completes it, in Axolotl 0.19 after this.
        merged = os.path.join(str(cfg.output_dir), "merged")
        adapter = str(cfg.get("lora_model_dir") or cfg.output_dir)
        if os.path.isfile(os.path.join(adapter, "pose.json")) and not os.path.exists(os.path.join(merged, "pose.json")):
            from pose_plugin.frameworks.axolotl_merge import complete_forgotten

            complete_forgotten(merged, adapter)
        return result

    _wrap(merge_lora, "do_merge_lora", do_merge_lora)


def _notice_plain_bases(peft_model: ModuleType) -> None:
    """peft.peft_model: warn if an adapter with an extension is put on a base without it."""

    def from_pretrained(original: Any, cls: type, model: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = original(cls, model, model_id, *args, **kwargs)
        # For other adapters, this look at the disk is all that happens.
        if os.path.isfile(os.path.join(str(model_id), "pose.json")):
            from pose_plugin.checkpoints.load import warn_of_plain_base

            warn_of_plain_base(loaded, model_id)
        return loaded

    _wrap(peft_model.PeftModel, "from_pretrained", from_pretrained)


def _make_beacons_known(config: ModuleType) -> None:
    """peft.config: import pose_plugin.beacon for a saved adapter of type POSE_PLUGIN_BEACON.

    For other adapters, one comparison is all that happens.
    """

    def known(original: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("peft_type") == _BEACON:
            importlib.import_module("pose_plugin.beacon")
        found = original(*args, **kwargs)
        if found == _BEACON:
            importlib.import_module("pose_plugin.beacon")
        return found

    for name in ("_get_peft_type", "from_peft_type"):
        _wrap(config.PeftConfigMixin, name, known)


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "axolotl.integrations.base": _accept_bare_name,
    "axolotl.cli.merge_lora": _complete_merges,
    "axolotl.cli.plugins": _pass_overrides_on,
    "axolotl.utils.config": _notice_forgotten_line,
    "peft.config": _make_beacons_known,
    "peft.peft_model": _notice_plain_bases,
}
