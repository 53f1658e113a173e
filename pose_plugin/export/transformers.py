"""transformers 5 reads the folder as it is; transformers 4 reads the older keys of the same config.json."""

from __future__ import annotations

from pose_plugin.checkpoints.saved import Saved
from pose_plugin.export.common import Export


def export(saved: Saved) -> Export:
    """Return the Python lines that load the model and its tokenizer."""
    folder = str(saved.shown)
    if saved.base is None:
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f'model = AutoModelForCausalLM.from_pretrained({folder!r}, dtype="auto")',
            f"tokenizer = AutoTokenizer.from_pretrained({folder!r})",
        ]
    else:
        revision = f"revision={saved.base.revision!r}, " if saved.base.revision else ""
        lines = [
            "from peft import PeftModel",
            "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer",
            f"config = AutoConfig.from_pretrained({folder!r})  # the adapter's: the base's lacks the extension",
            f'base = AutoModelForCausalLM.from_pretrained({saved.base_name!r}, {revision}config=config, dtype="auto")',
            f"model = PeftModel.from_pretrained(base, {folder!r})",
            f"tokenizer = AutoTokenizer.from_pretrained({(folder if saved.has_tokenizer else saved.base_name)!r})",
        ]
    notes = ["with this package: model = pose_plugin.load_extended(folder)"] if saved.base else []
    if not saved.older:
        notes.append(
            "transformers 4 reads rope_theta and rope_scaling of the same config.json, but not a tokenizer that "
            "transformers 5 saved: add --form 4 --output FOLDER"
        )
    return Export(lines, notes)
