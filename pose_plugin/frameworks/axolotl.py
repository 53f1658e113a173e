"""Axolotl: `plugins: [pose_plugin]` and a `pose:` block. Works in 0.19, 0.20 and 0.21.

The name without a dot reaches this class by an entry point: in 0.21 the group `axolotl.plugins`, before that the import
hook of `pose_plugin_hook`. 0.21 calls the hooks of every installed plugin in every run, so each of them does nothing
without a `pose:` block or `adapter: beacon`.
"""

from __future__ import annotations

import os
from typing import Any

from axolotl.integrations.base import AdapterCapabilities, BasePlugin, PluginManager
from axolotl.utils.collators.batching import DataCollatorForSeq2Seq, V2BatchSamplerDataCollatorForSeq2Seq
from pydantic import BaseModel, Field

from pose_plugin.collator import PositionCollator
from pose_plugin.config import PoSESettings
from pose_plugin.features import Packing
from pose_plugin.frameworks import axolotl_beacon as beacon
from pose_plugin.frameworks.axolotl_evaluate import WatchUntrained
from pose_plugin.frameworks.axolotl_machine import (
    end_without_network,
    place_on_cpu,
    prepare_cpu_ranks,
    turn_gpu_kernels_off,
)
from pose_plugin.frameworks.axolotl_merge import complete_merge, complete_next_merge, require_right_merge
from pose_plugin.frameworks.axolotl_overrides import apply_overrides
from pose_plugin.frameworks.axolotl_settings import (
    evaluated_length,
    likely_mistakes,
    plain,
    require_compatible,
    settings_of,
)
from pose_plugin.rope import merge_overrides, plan_rope, rope_overrides
from pose_plugin.rope.live import builds_text_alone
from pose_plugin.rope.read import text_config
from pose_plugin.training.binding import bind
from pose_plugin.utils.errors import FORGOTTEN_LINE, PoSEError
from pose_plugin.utils.findings import report
from pose_plugin.utils.log import log, show_log

_BARE = "pose_plugin"


class PoSEArgs(BaseModel):
    """The fields that Axolotl's schema gains: blocks with the fields of `PoSESettings` and of `BeaconConfig`."""

    pose: dict[str, Any] | None = Field(
        default=None, json_schema_extra={"description": "Context window extension by pose_plugin"}
    )
    beacon: dict[str, Any] | None = Field(
        default=None, json_schema_extra={"description": "Activation Beacon by pose_plugin, for adapter: beacon"}
    )


class PosePlugin(BasePlugin):
    """Trains long distances in short windows; see `PoSESettings` for the keys of the `pose:` block."""

    def __init__(self) -> None:
        super().__init__()
        manager = PluginManager()
        # 0.21 registers installed plugins under their dotted name before it looks up the names of the YAML. This entry
        # makes the bare name known by then. It is a placeholder; the dotted instance does the work.
        if _has_entry_points() and _BARE not in manager.plugins:
            manager.plugins[_BARE] = BasePlugin()

    def register(self, cfg: Any) -> None:
        """Check the block and put the RoPE override where every later load of the config reads it.

        Raises:
            PoSEError: naming the key, its value and the fix.
        """
        if not self._is_live():
            return
        show_log()
        end_without_network()
        apply_overrides(cfg)
        beacon.prepare(cfg)
        for warning in beacon.without_effect(cfg):
            log.warning(warning)
        if cfg.get("pose") is not None or beacon.is_beacon(cfg):
            turn_gpu_kernels_off(cfg)
            prepare_cpu_ranks(cfg)
        listed = any(str(name).startswith(_BARE) for name in cfg.get("plugins") or [])
        if cfg.get("pose") is None:
            if listed and not beacon.is_beacon(cfg):
                log.warning(
                    "plugins names pose_plugin, but there is no `pose:` block, so the plugin does nothing. Add one, "
                    "e.g. `pose: {target_length: 32768}`, or remove the plugin"
                )
            return
        if not listed:
            raise PoSEError(FORGOTTEN_LINE)
        settings = settings_of(cfg)
        require_compatible(cfg, settings)
        for warning in likely_mistakes(cfg, settings):
            log.warning(warning)
        if evaluated := evaluated_length(cfg):
            log.info("evaluation runs on plain positions, rows of up to %s=%s tokens", *evaluated)
        _override_rope(cfg, settings)
        if cfg.get("merge_lora"):
            require_right_merge(cfg)
        if cfg.get("merge_lora") and not _has_entry_points():
            complete_next_merge(settings)

    def get_input_args(self) -> str | None:
        return f"{PoSEArgs.__module__}.{PoSEArgs.__qualname__}" if self._is_live() else None

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        # The first hook after Axolotl has chosen devices. Returning None leaves the data to Axolotl.
        if self._acts(cfg):
            place_on_cpu(cfg)

    def get_adapter_capabilities(self) -> list[AdapterCapabilities]:
        return [AdapterCapabilities(name=beacon.ADAPTER)] if self._is_live() else []

    def post_model_build(self, cfg: Any, model: Any) -> None:
        if beacon.is_beacon(cfg) and self._is_live():
            beacon.note_window(model)

    def load_adapter(self, model: Any, cfg: Any, inference: bool = False, config_only: bool = False) -> Any:
        return beacon.load(model, cfg, inference, config_only) if self._is_live() else None

    def get_collator_cls_and_kwargs(self, cfg: Any, is_eval: bool = False) -> Any:
        if not self._active(cfg):
            return None
        return make_collator, {"settings": settings_of(cfg), "training": not is_eval}

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        # The one hook around the trainer that `axolotl evaluate` calls too.
        return [WatchUntrained(cfg)] if self._acts(cfg) else []

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        if beacon.is_beacon(cfg) and self._is_live():
            # Imported here, as other runs do not need it.
            from pose_plugin.beacon.trainer import bind_beacon

            bind_beacon(trainer)
        if not self._active(cfg):
            return
        collator = trainer.data_collator
        if not isinstance(collator, PositionCollator):
            raise PoSEError(
                f"plugins={list(cfg.plugins)}: the trainer's collator is {type(collator).__name__}, set by another "
                "plugin. Put pose_plugin first, or remove the other one"
            )
        self._bound = bind(trainer, collator, pack=Packing.LISTS if cfg.sample_packing else None)
        self._bound.data = [str(each["path"]) for each in cfg.get("datasets") or [] if each.get("path")]

    def post_train(self, cfg: Any, model: Any) -> None:
        # The process group may be gone by now, so the rank is read from the launcher's variable.
        if self._active(cfg) and os.environ.get("RANK", "0") == "0":
            # Axolotl may have saved the model again without the trainer.
            self._bound.complete(cfg.output_dir)

    def post_lora_merge(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        if self._active(cfg):
            complete_merge(cfg, settings_of(cfg))

    def _active(self, cfg: Any) -> bool:
        return cfg.get("pose") is not None and self._is_live()

    def _acts(self, cfg: Any) -> bool:
        return self._active(cfg) or (beacon.is_beacon(cfg) and self._is_live())

    def _is_live(self) -> bool:
        """Return whether this instance acts: one per run, as two spellings would extend the schema and bind twice."""
        for plugin in PluginManager().plugins.values():
            if isinstance(plugin, PosePlugin):
                return plugin is self
        return True


def make_collator(tokenizer: Any, *, settings: PoSESettings, training: bool, **kwargs: Any) -> PositionCollator:
    """Return Axolotl's padding with our positions in training. `kwargs` are those that Axolotl gives its collators."""
    collator = PositionCollator(_AxolotlPadding(tokenizer, **kwargs), settings, padding_side=tokenizer.padding_side)
    collator.training = training
    return collator


class _AxolotlPadding:
    """Axolotl's collator for packs if the sampler gives lists of rows, else the one for single rows."""

    def __init__(self, tokenizer: Any, **kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self._rows = DataCollatorForSeq2Seq(tokenizer, **kwargs)
        self._packs = V2BatchSamplerDataCollatorForSeq2Seq(tokenizer, **kwargs)

    def __call__(self, features: list[Any], *args: Any, **kwargs: Any) -> Any:
        inner = self._packs if isinstance(features[0], list) else self._rows
        return inner(features, *args, **kwargs)


def _override_rope(cfg: Any, settings: PoSESettings) -> None:
    """Put the RoPE of the `pose:` block into `overrides_of_model_config`, from which Axolotl builds each config."""
    base = _base_config(cfg)
    text = text_config(base)
    if text is not base and builds_text_alone(base):
        # Overrides are set on the whole config, which does not pass them on. With this key Axolotl reads the text part
        # only, from which the same class is built.
        cfg["cls_model_config"] = type(text).__name__
        base = text
    plan = plan_rope(base, settings.target_length, settings.rope)
    log.info("rope before: %s", plan.before)
    log.info("rope after:  %s", plan.after)
    for note in plan.notes:
        log.info("rope: %s", note)
    report(plan.findings, "rope: ")
    ours = rope_overrides(base, settings.target_length, settings.rope)
    cfg["overrides_of_model_config"] = merge_overrides(ours, plain(cfg.get("overrides_of_model_config")))


def _base_config(cfg: Any) -> Any:
    from transformers import AutoConfig

    name = cfg.get("base_model_config") or cfg.get("base_model")
    revision = {"revision": cfg.get("revision_of_model")} if cfg.get("revision_of_model") else {}
    return AutoConfig.from_pretrained(name, trust_remote_code=cfg.get("trust_remote_code") is True, **revision)


def _has_entry_points() -> bool:
    """Return whether this Axolotl finds plugins by entry points, as 0.21 and later do."""
    from axolotl.integrations import base

    return hasattr(base, "PLUGIN_ENTRY_POINT_GROUP")
