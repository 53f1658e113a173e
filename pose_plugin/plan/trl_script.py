"""Read what a TRL script will train, without running it.

The script is parsed, and the arguments of a few calls are read: `SFTConfig(…)`, `extend_context(…)`, `PoSECollator(…)`,
`LoraConfig(…)` and others. Each must be a literal, or the name of a constant that the script sets once, at its top. `*`
and `**` in these calls are refused.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from pose_plugin.config import PoSESettings
from pose_plugin.plan.config_reader import Inputs, from_values, lossy_bf16
from pose_plugin.utils.errors import PoSEError

_MODEL, _DATA = "AutoModelForCausalLM.from_pretrained", "load_dataset"
_CALLS = ("SFTConfig", "extend_context", "PoSECollator", "LoraConfig", "BitsAndBytesConfig", _MODEL, _DATA)
_NEEDED = ("SFTConfig", "PoSECollator", _MODEL)
# Arguments of SFTConfig, the key of Axolotl with the same meaning, and TRL's default.
_ARGUMENTS: dict[str, tuple[str, Any]] = {
    "per_device_train_batch_size": ("micro_batch_size", 8),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    "num_train_epochs": ("num_epochs", 3),
    "max_steps": ("max_steps", -1),
    "learning_rate": ("learning_rate", 2e-5),
    "gradient_checkpointing": ("gradient_checkpointing", True),
    "optim": ("optimizer", "adamw_torch_fused"),
    "optim_args": ("optim_args", None),
    "packing": ("sample_packing", False),
    "use_liger_kernel": ("liger_fused_linear_cross_entropy", False),
    "deepspeed": ("deepspeed", None),
    "bf16": ("bf16", True),
    "fp16": ("fp16", False),
}
_WITH_A_GPU = ("torch.cuda.is_available()", "torch.cuda.is_bf16_supported()")
# Methods of a data set that leave rows out; how many a filter leaves is not known either, but most leave nearly all.
_PARTS = ("train_test_split", "select", "shard", "take", "skip")
# Words of errors about a YAML, and what a script has in their place.
_IN_A_SCRIPT = {
    rf"\bpose\.(?=(?:{'|'.join(PoSESettings.model_fields)})\b)": "",
    r"\bsequence_len\b": "max_length",
    r"\bsample_packing\b": "packing",
    r"\bmicro_batch_size\b": "per_device_train_batch_size",
    r"\bnum_epochs\b": "num_train_epochs",
    r"\bthe YAML\b": "the script",
}


def from_script(path: str | Path, base: str | None = None, **given: Any) -> Inputs:
    """Read a TRL script; the arguments are those of `from_yaml`.

    Raises:
        PoSEError: the file cannot be read, a call that is needed is missing, or an argument is computed.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PoSEError(f"{path}: {error}; give a TRL script or an Axolotl YAML") from None
    return inputs_of_script(text, str(path), base, **given)


def inputs_of_script(text: str, name: str, base: str | None = None, **given: Any) -> Inputs:
    """Read the text of a TRL script; `name` stands for it in errors."""
    script = _Script(text, name)
    values = script.values()
    try:
        inputs = from_values(values, base, apart=True, **given)
    except PoSEError as error:
        message = str(error)
        for word, replacement in _IN_A_SCRIPT.items():
            message = re.sub(word, replacement, message)
        raise PoSEError(f"{name}: {message}") from None
    if "LoraConfig" in script.calls and script.get("LoraConfig", "target_modules") is None:
        inputs = replace(inputs, run=replace(inputs.run, lora_targets=_usual_targets(inputs)))
    if values["deepspeed"]:
        return inputs  # its bf16 weights have a float32 copy, however the model was loaded
    dtype = script.dtype or str(inputs.config.get("dtype") or inputs.config.get("torch_dtype"))
    wide = "float32" in dtype
    if inputs.run.method == "full":
        # accelerate widens what FSDP trains. The type of the computation, and so of activations, stays.
        run = replace(inputs.run, trained_bytes=4 if wide or values["fsdp_config"] else 2)
    else:
        run = replace(inputs.run, weight_bytes=4 if wide else 2)
    return replace(inputs, run=run, bf16=lossy_bf16(values, run))


def _usual_targets(inputs: Inputs) -> list[str] | str:
    """Return the modules that PEFT adapts if LoraConfig names none: of a Llama, q_proj and v_proj."""
    try:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL
    except ImportError:
        return inputs.run.lora_targets
    found = USUAL.get(str(inputs.config.get("model_type")), inputs.run.lora_targets)
    return found if isinstance(found, str) else list(found)


class _Script:
    """The calls of a script, each with the nodes of its arguments: "0", "1", … and keywords."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise PoSEError(f"{name} is not valid Python: {error}") from None
        stored = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        self.constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            # What is set again, even in a branch, may have another value by then.
            if isinstance(target, ast.Name) and stored.count(target.id) == 1
        }
        methods = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        self.part = next((f"{name}(…)" for name in _PARTS if name in methods), None)
        self.calls: dict[str, dict[str, ast.expr]] = {}
        for node in ast.walk(tree):
            call = ast.unparse(node.func) if isinstance(node, ast.Call) else None
            if not isinstance(node, ast.Call) or call not in _CALLS:
                continue
            if call in self.calls:
                raise PoSEError(f"{name} calls {call} twice, so it is not known which one trains; remove one")
            unread = [ast.unparse(each) for each in node.args if isinstance(each, ast.Starred)]
            unread += [f"**{ast.unparse(each.value)}" for each in node.keywords if each.arg is None]
            if unread:
                raise PoSEError(
                    f"{name}, line {node.lineno}: {unread[0]} of {call}(…) cannot be read; write its arguments into "
                    "the call, or give the settings as options"
                )
            arguments = {str(i): argument for i, argument in enumerate(node.args)}
            self.calls[call] = arguments | {str(each.arg): each.value for each in node.keywords}
        missing = [call for call in _NEEDED if call not in self.calls]
        if missing:
            raise PoSEError(
                f"{name} does not call {missing[0]}(…), so it cannot be planned; give a TRL script, an Axolotl YAML, "
                "or the settings as options"
            )

    def get(self, call: str, argument: str, default: Any = None) -> Any:
        """Return the value of an argument.

        Raises:
            PoSEError: it is neither a literal nor a constant of the script.
        """
        node = self.calls.get(call, {}).get(argument)
        if node is None:
            return default
        known = _Constants(self.constants).visit(ast.parse(ast.unparse(node), mode="eval"))
        try:
            return ast.literal_eval(known)
        except (ValueError, TypeError, RecursionError):
            raise PoSEError(
                f"{self.name}: {argument}={ast.unparse(node)} of {call} is neither a literal nor a constant that the "
                "script sets once, at its top; write its value there, or give the settings as options"
            ) from None

    def others(self, call: str, *without: str) -> dict[str, Any]:
        """Return all arguments of a call but some."""
        return {name: self.get(call, name) for name in self.calls.get(call, {}) if name not in without}

    @property
    def dtype(self) -> str:
        """The type in which the model is loaded, e.g. "torch.float32"; "" if it is that of the base."""
        node = self.calls[_MODEL].get("dtype") or self.calls[_MODEL].get("torch_dtype")
        dtype = "" if node is None else ast.unparse(node)
        return "" if "auto" in dtype else dtype

    def values(self) -> dict[str, Any]:
        """Return what the script sets, by the keys of an Axolotl YAML."""
        pose = self.others("PoSECollator", "0", "1", "tokenizer", "collate")
        if "extend_context" in self.calls:
            rope = self.get("extend_context", "rope", self.get("extend_context", "2", "yarn"))
            more = self.others("extend_context", "0", "1", "2", "config", "target_length", "rope")
            pose["rope"] = ({"type": rope} if isinstance(rope, str) else rope) | more if more else rope
            target = self.get("extend_context", "target_length", self.get("extend_context", "1"))
            pose.setdefault("target_length", target)
        answers = self.get("SFTConfig", "assistant_only_loss", False)
        data = {"split": self.part or self.get(_DATA, "split"), "type": "chat_template" if answers else None}
        files = self.get(_DATA, "data_files")
        values = {key: self.get("SFTConfig", name, usual) for name, (key, usual) in _ARGUMENTS.items()}
        sharded = self.get("SFTConfig", "fsdp") and (self.get("SFTConfig", "fsdp_config") or {"version": 2})
        return {
            **values,
            "base_model": self.get(_MODEL, "0") or self.get(_MODEL, "pretrained_model_name_or_path"),
            "sequence_len": self.get("SFTConfig", "max_length", 1024),
            "excess_length_strategy": "truncate",
            "pose": pose,
            "datasets": [{"path": file, **data} for file in (files if isinstance(files, list) else [files])],
            "attn_implementation": self.get(_MODEL, "attn_implementation"),
            "fsdp_config": sharded or None,
            **self._adapter(),
        }

    def _adapter(self) -> dict[str, Any]:
        if "LoraConfig" not in self.calls:
            return {}
        four = self.get("BitsAndBytesConfig", "load_in_4bit", False)
        targets = self.get("LoraConfig", "target_modules", "all-linear")
        return {
            "adapter": "qlora" if four else "lora",
            "lora_r": self.get("LoraConfig", "r", 8),
            "lora_target_linear": targets == "all-linear",
            "lora_target_modules": targets,
            "lora_modules_to_save": self.get("LoraConfig", "modules_to_save"),
            "load_in_4bit": four,
            "load_in_8bit": self.get("BitsAndBytesConfig", "load_in_8bit", False),
            "bnb_config_kwargs": {
                "bnb_4bit_use_double_quant": self.get("BitsAndBytesConfig", "bnb_4bit_use_double_quant", False)
            },
        }


class _Constants(ast.NodeTransformer):
    """Replaces the names of constants by their values. A plan is for a machine with a GPU that computes in bf16."""

    def __init__(self, constants: dict[str, ast.expr]) -> None:
        self.constants = constants

    def visit_Name(self, node: ast.Name) -> ast.expr:
        found = self.constants.get(node.id, node)
        return self.visit_Call(found) if isinstance(found, ast.Call) else found

    def visit_Call(self, node: ast.Call) -> ast.expr:
        return ast.Constant(True) if ast.unparse(node) in _WITH_A_GPU else node
