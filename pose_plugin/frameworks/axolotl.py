"""Axolotl: `plugins: [pose_plugin]` and a `pose:` block. Works in 0.19, 0.20 and 0.21.

The literal name without a dot reaches this class by an entry point: in 0.21 the group `axolotl.plugins`, before that
the import hook of `pose_plugin._autoload`. 0.21 calls the hooks of every installed plugin in every run, so all of them
do nothing without a `pose:` block or `adapter: beacon`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axolotl.integrations.base import AdapterCapabilities, BasePlugin, PluginManager
from axolotl.utils.collators.batching import DataCollatorForSeq2Seq, V2BatchSamplerDataCollatorForSeq2Seq
from pydantic import BaseModel, Field

from pose_plugin.checkpoints import complete_folder, read_record
from pose_plugin.checkpoints.merge import complete_merged
from pose_plugin.collator import Packing, PositionCollator
from pose_plugin.config import PoSESettings, parse_settings
from pose_plugin.export.card import write_card
from pose_plugin.frameworks import axolotl_beacon as beacon
from pose_plugin.rope import merge_overrides, plan_rope, rope_overrides
from pose_plugin.training.trainer import bind
from pose_plugin.utils.errors import FORGOTTEN_LINE, PoSEError
from pose_plugin.utils.log import log, show_log

_BARE, _DOTTED = "pose_plugin", "pose_plugin.PosePlugin"
_BUILT_IN = ("use_pose", "pose_split_on_token_ids", "pose_max_context_len", "pose_num_chunks")


class PoSEArgs(BaseModel):
    """What Axolotl's schema gains. The fields of the blocks are those of `PoSESettings` and of `BeaconConfig`."""

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
        # 0.21 registers installed plugins under their dotted name before it looks up the YAML's names; with this entry
        # the bare name is known by then. The placeholder does nothing, the dotted instance does it all.
        if _has_entry_points() and _BARE not in manager.plugins:
            manager.plugins[_BARE] = BasePlugin()

    def register(self, cfg: Any) -> None:
        """Checks the block and puts the RoPE override where every later load of the config reads it.

        Raises:
            PoSEError: naming the key, its value and the way out.
        """
        show_log()
        listed = [name for name in map(str, cfg.get("plugins") or []) if name.startswith(_BARE)]
        if self._is_live():
            beacon.prepare(cfg)
        if cfg.get("pose") is None:
            if listed and self._is_live() and not beacon.is_beacon(cfg):
                log.warning(
                    "plugins names pose_plugin, but there is no `pose:` block: this run trains as without it. Add one, "
                    "e.g. `pose: {target_length: 32768}`, or remove the plugin"
                )
            return
        if not listed:
            raise PoSEError(FORGOTTEN_LINE)
        if not self._is_live():
            return
        settings = settings_of(cfg)
        _refuse_other_keys(cfg, settings)
        base = _base_config(cfg)
        plan = plan_rope(base, settings.target_length, settings.rope)
        log.info("rope before: %s", plan.before)
        log.info("rope after:  %s", plan.after)
        for note in plan.notes:
            log.info("rope: %s", note)
        for warning in plan.warnings:
            log.warning("rope: %s", warning)
        ours = rope_overrides(base, settings.target_length, settings.rope)
        cfg["overrides_of_model_config"] = merge_overrides(ours, _plain(cfg.get("overrides_of_model_config")))
        if cfg.get("merge_lora") and not _has_entry_points():
            _mend_after_the_merge()

    def get_input_args(self) -> str | None:
        return f"{PoSEArgs.__module__}.{PoSEArgs.__qualname__}" if self._is_live() else None

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

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        if beacon.is_beacon(cfg) and self._is_live():
            # Imported here: other runs need nothing of it.
            from pose_plugin.beacon.trainer import bind_beacon

            bind_beacon(trainer)
        if not self._active(cfg):
            return
        collator = trainer.data_collator
        if not isinstance(collator, PositionCollator):
            raise PoSEError(
                f"the trainer's collator is {type(collator).__name__}, not the plugin's: another plugin in "
                f"plugins={list(cfg.plugins)} sets its own. Put pose_plugin first, or remove the other one"
            )
        self._bound = bind(trainer, collator, pack=Packing.LISTS if cfg.sample_packing else None)
        self._bound.data = [str(each["path"]) for each in cfg.get("datasets") or [] if each.get("path")]

    def post_train(self, cfg: Any, model: Any) -> None:
        # The process group is gone by the second call, so the rank is read from what the launcher has set.
        if self._active(cfg) and os.environ.get("RANK", "0") == "0":
            # Axolotl may have written the model once more.
            self._bound.complete(cfg.output_dir)

    def post_lora_merge(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        if self._active(cfg):
            _mend_merged(cfg)

    def _active(self, cfg: Any) -> bool:
        return cfg.get("pose") is not None and self._is_live()

    def _is_live(self) -> bool:
        """One of several spellings of the name acts: two would enter the schema twice and bind twice."""
        for plugin in PluginManager().plugins.values():
            if isinstance(plugin, PosePlugin):
                return plugin is self
        return True


def settings_of(cfg: Any) -> PoSESettings:
    """The `pose:` block with what follows from the rest of the YAML.

    Raises:
        PoSEError: naming the key, its value and the way out.
    """
    block = _plain(cfg.get("pose"))
    sequence_len = cfg.get("sequence_len")
    if isinstance(block, dict) and block.get("train_length") is None and sequence_len:
        content = block.get("content", "contiguous")
        if content in ("window", "skip", "aligned"):
            raise PoSEError(
                f"pose.content={content} takes a window out of longer documents, but rows are as long as "
                f"sequence_len={sequence_len}, which is also the window. Set pose.train_length to the window and "
                "sequence_len to the documents' length"
            )
        block = {**block, "train_length": int(sequence_len)}
    settings = parse_settings(block)
    if settings.content != "contiguous" and sequence_len and settings.train_length == sequence_len:
        raise PoSEError(
            f"pose.content={settings.content} has no effect with pose.train_length=sequence_len={sequence_len}: no row "
            "is longer than the window. Raise sequence_len to the documents' length, or write content: contiguous"
        )
    return settings


def make_collator(tokenizer: Any, *, settings: PoSESettings, training: bool, **kwargs: Any) -> PositionCollator:
    """Axolotl's own padding, with our positions in training. `kwargs` are those that Axolotl gives its collators."""
    collator = PositionCollator(_AxolotlPadding(tokenizer, **kwargs), settings, padding_side=tokenizer.padding_side)
    collator.training = training
    return collator


class _AxolotlPadding:
    """Axolotl's collator for packs or for single rows, by what the sampler hands over."""

    def __init__(self, tokenizer: Any, **kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self._rows = DataCollatorForSeq2Seq(tokenizer, **kwargs)
        self._packs = V2BatchSamplerDataCollatorForSeq2Seq(tokenizer, **kwargs)

    def __call__(self, features: list[Any], *args: Any, **kwargs: Any) -> Any:
        inner = self._packs if isinstance(features[0], list) else self._rows
        return inner(features, *args, **kwargs)


def _refuse_other_keys(cfg: Any, settings: PoSESettings) -> None:
    for key in _BUILT_IN:
        if cfg.get(key) is not None:
            raise PoSEError(
                f"{key}={cfg.get(key)!r} belongs to Axolotl's built-in use_pose, which cannot run beside the `pose:` "
                "block. Remove it; ours are pose.target_length and pose.chunks"
            )
    for key, why in {
        "pretraining_dataset": "Axolotl gives streamed rows its own collator. Use `datasets:` with type: completion",
        "rl": "preference and RL trainers have collators of their own. Extend the window by supervised training first",
        "reward_model": "reward trainers have collators of their own",
        "process_reward_model": "reward trainers have collators of their own",
        "processor_type": "multimodal rows have 3-D positions. Train the text model",
    }.items():
        if cfg.get(key):
            raise PoSEError(f"{key}={cfg.get(key)!r} and `pose:` cannot be combined: {why}")
    if cfg.get("streaming") and cfg.get("sample_packing"):
        raise PoSEError(
            "streaming=True with sample_packing=True packs rows while it reads them, and where documents end does not "
            "reach the collator: they would be trained as one. Set sample_packing: false, or streaming: false"
        )
    for key in ("context_parallel_size", "sequence_parallel_degree"):
        if cfg.get(key) not in (None, 0, 1):
            raise PoSEError(
                f"{key}={cfg.get(key)} splits each row over devices: Axolotl then counts the positions of a batch "
                "above one row anew, without jumps, and finds documents by rules of its own. "
                f"Set {key}: 1: PoSE rows are short, and data parallelism or ZeRO-3/FSDP uses the devices"
            )
    if (cfg.get("fsdp_config") or cfg.get("fsdp_version")) and cfg.get("adapter") and cfg.get("lora_modules_to_save"):
        log.warning(
            "lora_modules_to_save=%s under FSDP2: Axolotl 0.19 and 0.21 end in a KeyError when they save, after the "
            "training. Use DeepSpeed ZeRO-3 (deepspeed: …/zero3.json), or leave lora_modules_to_save out",
            cfg.get("lora_modules_to_save"),
        )
    window, sequence_len = settings.train_length, cfg.get("sequence_len")
    if window is not None and sequence_len and window > sequence_len:
        raise PoSEError(
            f"pose.train_length={window} is longer than sequence_len={sequence_len}, the longest row. Lower it, or "
            "raise sequence_len"
        )
    if window is not None and sequence_len and window < sequence_len and settings.content == "contiguous":
        log.warning(
            "pose.content=contiguous reads the first pose.train_length=%d tokens of each row and never what is behind "
            "them (rows have up to sequence_len=%d). content: window or skip reads all of it",
            window,
            sequence_len,
        )
    if cfg.get("sample_packing") and window is not None and sequence_len and window < sequence_len:
        log.warning(
            "sample_packing fills rows of sequence_len=%d by whole documents, which are then cut to "
            "pose.train_length=%d: rows come out shorter and of unlike length. sample_packing: false keeps steps alike",
            sequence_len,
            window,
        )
    if cfg.get("test_datasets") or cfg.get("val_set_size"):
        log.info("evaluation runs on plain positions, rows of up to sequence_len=%s tokens", sequence_len)
        if sequence_len and sequence_len > settings.target_length:
            log.warning(
                "evaluation rows of up to sequence_len=%d tokens go beyond pose.target_length=%d, which the model is "
                "not trained for. Give shorter rows in test_datasets, or raise the target",
                sequence_len,
                settings.target_length,
            )


def _base_config(cfg: Any) -> Any:
    from transformers import AutoConfig

    name = cfg.get("base_model_config") or cfg.get("base_model")
    revision = {"revision": cfg.get("revision_of_model")} if cfg.get("revision_of_model") else {}
    return AutoConfig.from_pretrained(name, trust_remote_code=cfg.get("trust_remote_code") is True, **revision)


def _has_entry_points() -> bool:
    """Axolotl 0.21 and later."""
    from axolotl.integrations import base

    return hasattr(base, "PLUGIN_ENTRY_POINT_GROUP")


def _mend_merged(cfg: Any) -> None:
    """Axolotl's memory-efficient merge copies the base's config.json, and both methods leave the limit to chance."""
    folder = Path(cfg.output_dir) / "merged"
    adapter = Path(cfg.get("lora_model_dir") or cfg.output_dir)
    if read_record(adapter):
        complete_merged(folder, adapter)
        write_card(folder)
        log.info("%s has the extension; compare it with the trained model: pose-plugin check %s", folder, folder)
        return
    from axolotl.loaders.utils import load_model_config

    config = load_model_config(cfg)
    if cfg.get("merge_method") != "legacy":
        # The legacy method saves the model's own config, with the override and the merged dtype.
        config.save_pretrained(folder)
    complete_folder(folder, config, settings_of(cfg))


def _mend_after_the_merge() -> None:
    """Stands in for `post_lora_merge` where Axolotl has no such hook; gone after the one merge of the process."""
    from axolotl.cli import merge_lora as module

    merge = module.do_merge_lora

    @functools.wraps(merge)
    def merge_and_mend(*, cfg: Any) -> None:
        module.do_merge_lora = merge
        merge(cfg=cfg)
        _mend_merged(cfg)

    module.do_merge_lora = merge_and_mend


def _plain(value: Any) -> Any:
    """Axolotl's DictDefault answers None for keys that are missing; plain dicts do not."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def complete_forgotten(folder: str | Path, adapter: str | Path) -> None:
    """`complete_merged` after a merge that knew nothing of the extension; a warning says so, also where it fails."""
    show_log()
    try:
        complete_merged(folder, adapter)
        write_card(folder)
    except (PoSEError, OSError) as error:
        log.warning(
            "%s was merged from an adapter with an extended window (%s), by a config without the `pose:` block, and "
            "has the base's window: %s. Give it the adapter's: pose-plugin check %s --like %s --repair",
            folder, adapter, error, folder, adapter,
        )  # fmt: skip
        return
    log.warning(
        "the config of this merge has no `pose:` block, but %s was trained with one: the merged model has the "
        "adapter's rope, window and record. Compare them: pose-plugin check %s",
        adapter,
        folder,
    )
