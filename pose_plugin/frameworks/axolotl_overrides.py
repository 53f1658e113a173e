"""Axolotl: `axolotl train config.yaml --pose.target_length 4096` overrides a key of the `pose:` or `beacon:` block.

Axolotl overrides only the keys of its schema. It hands other options to the launcher, or puts them into the config
under their dotted name, where its validation drops them silently.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.log import log

_BLOCKS = ("pose", "beacon")
_COMMANDS = ("preprocess", "train", "evaluate", "inference", "merge-sharded-fsdp-weights", "merge-lora")
# `--pose.rope.type ntk`, `--beacon.interval=64`, `--pose "{…}"`.
_OPTION = re.compile(rf"--((?:{'|'.join(_BLOCKS)})(?:\.[\w.-]+)?)(?:=(.*))?", re.DOTALL)
# As keys of the config. python-fire and Axolotl write some dots as two underscores.
_KEY = re.compile(rf"(no_?)?({'|'.join(_BLOCKS)})(?:\.|__)(.+)")


def pass_overrides_on(command: Any) -> Any:
    """Let a click command of Axolotl pass our options on to the config, as it does with options of Axolotl's schema.

    Args:
        command: any; only those that read a config are changed. Options after `--` are the launcher's and stay.
    """
    if getattr(command, "name", None) not in _COMMANDS or hasattr(command.parse_args, "_pose_plugin"):
        return command
    parse = command.parse_args

    @functools.wraps(parse)
    def parse_args(context: Any, args: list[str]) -> list[str]:
        ours, others = _split(args)
        rest: list[str] = parse(context, others)
        context.params.update(ours)
        return rest

    parse_args._pose_plugin = True  # type: ignore[attr-defined]
    command.parse_args = parse_args
    return command


def _split(args: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return our options, by dotted name, and the other arguments."""
    import click

    ours, others = {}, []
    waiting = iter(args)
    for arg in waiting:
        found = _OPTION.fullmatch(arg)
        if found is None:
            others.append(arg)
            if arg == "--":
                others.extend(waiting)
            continue
        name, value = found.groups()
        if value is None:
            value = next(waiting, "--")
            if value.startswith("--"):
                raise click.UsageError(f"{arg} needs a value, written as in the YAML")
        ours[name.replace("-", "_")] = value
    return ours, others


def apply_overrides(cfg: Any) -> None:
    """Move overrides from the command line into the `pose:` and `beacon:` blocks. Values are read as in the YAML.

    Raises:
        PoSEError: an override of a key inside something that is not a block, or one that Axolotl's command dropped.
    """
    # Only the process of the command `axolotl` itself imports this module.
    commands = sys.modules.get("axolotl.cli.plugins")
    lost = [each for each in sys.argv if _OPTION.fullmatch(each)]
    if lost and commands and not hasattr(commands.PluginCommandGroup.get_command, "_pose_plugin"):
        raise PoSEError(
            f"{lost[0]} does not reach the config, because TORCH_DEVICE_BACKEND_AUTOLOAD="
            f"{os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD')} turns pose_plugin's hook off. Unset it, or write the "
            "key in the YAML"
        )
    for name in _BLOCKS:
        if isinstance(cfg.get(name), str):
            cfg[name] = _value(name, cfg[name])
    for key in [str(each) for each in cfg]:
        found = _KEY.fullmatch(key)
        if found is None:
            continue
        value = cfg.pop(key)
        negated, block, path = found.groups()
        if negated:
            raise PoSEError(f"--{key}: a switch of the `{block}:` block is written --{block}.{path} false")
        value = _value(f"{block}.{path}", value) if isinstance(value, str) else value
        cfg[block] = _replaced(cfg.get(block), [block, *re.split(r"\.|__", path)], value)


def _value(name: str, text: str) -> Any:
    """Return the value of an option, which is written as in the YAML.

    Raises:
        PoSEError: it is not YAML.
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PoSEError(f"--{name} {text}: the value is not valid YAML: {' '.join(str(error).split())}") from None


def _replaced(block: Any, path: list[str], value: Any) -> dict[str, Any]:
    """Return a copy of a block with one key replaced.

    Args:
        block: a mapping, None, or the short form of a `rope:` block, its type.
        path: names of the block, of nested blocks, and of the key.
        value: the new value.
    """
    if path[0] == "rope" and isinstance(block, str):
        block = {"type": block}
    if block is not None and not isinstance(block, Mapping):
        raise PoSEError(f"--{'.'.join(path)}={value!r}: `{path[0]}: {block!r}` is not a block, so it has no keys")
    old = dict(block or {})
    name = path[1]
    if len(path) > 2:
        return {**old, name: _replaced(old.get(name), path[1:], value)}
    log.info("%s=%r from the command line (the YAML has %r)", name, value, old.get(name))
    return {**old, name: value}
