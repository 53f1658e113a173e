"""Read a saved folder's rope from its files, without loading anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pose_plugin.checkpoints.adapter import ADAPTER, Base, base_of, is_adapter, require_model
from pose_plugin.checkpoints.folder import read_record, text_part
from pose_plugin.rope.kinds import normalise, yarn_attention_factor
from pose_plugin.rope.read import FULL
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import read_json


@dataclass(frozen=True)
class Saved:
    """A model or adapter on disk.

    Attributes:
        path: its folder.
        config: the whole config.json.
        text: the part that holds the rope.
        rope: the flat rope dict of the layers that see far.
        maximum: max_position_embeddings, tokens.
        tokenizer_maximum: the tokenizer's model_max_length; None without a tokenizer.
        base: of an adapter, else None.
        adapter: adapter_config.json, {} for a full model.
        record: pose.json, {} if missing.
        older: whether `path` is a copy in the form of transformers 4; the other fields describe its original.
    """

    path: Path
    config: dict[str, Any]
    text: dict[str, Any]
    rope: dict[str, Any]
    maximum: int
    tokenizer_maximum: int | None
    base: Base | None
    adapter: dict[str, Any]
    record: dict[str, Any]
    older: bool = False

    @property
    def kind(self) -> str:
        return str(self.rope["rope_type"])

    @property
    def factor(self) -> float:
        return float(self.rope.get("factor") or 1.0)

    @property
    def model_type(self) -> str:
        return str(self.text.get("model_type"))

    @property
    def composite(self) -> bool:
        """Return whether the rope is in a text_config, which an engine's overrides of the config do not reach."""
        return self.text is not self.config

    def rope_with(self, **changes: Any) -> dict[str, Any]:
        """Return all rope parameters, nested by layer type or not, with changes to the layers that see far."""
        parameters: dict[str, Any] = self.text["rope_parameters"]
        if FULL in parameters:
            return {**parameters, FULL: {**parameters[FULL], **changes}}
        return {**parameters, **changes}

    @property
    def overrides(self) -> dict[str, Any]:
        """Return what a plain base's config lacks, for engines that take it as JSON."""
        return {"rope_parameters": self.text["rope_parameters"], "max_position_embeddings": self.maximum}

    @property
    def extra_attention(self) -> float:
        """Return the scale of cos and sin as a multiple of YaRN's own 0.1·ln s + 1; 1 for other kinds."""
        if self.kind != "yarn" or not self.rope.get("attention_factor"):
            return 1.0
        return float(self.rope["attention_factor"]) / yarn_attention_factor(self.factor)


def read_saved(folder: str | Path, tokenizer_maximum: int | None = None) -> Saved:
    """Read a folder's files; no weights are loaded.

    Args:
        folder: of the model or adapter.
        tokenizer_maximum: if known; the tokenizer's file, which another process may be writing, is then not read.

    Raises:
        PoSEError: no such folder, no config.json, or a config without rope_parameters.
    """
    path = require_model(folder)
    adapter = is_adapter(path)
    if not (path / "config.json").is_file():
        raise PoSEError(
            f"{path} has no config.json next to its adapter, so its rope is unknown; name a folder that a run of this "
            "package saved"
        )
    config = read_json(path / "config.json")
    text = text_part(config)
    parameters = (text or {}).get("rope_parameters")
    if text is None or not parameters:
        raise PoSEError(
            f"{path}/config.json has no rope_parameters; save it with transformers 5, or name a folder that a run of "
            "this package saved"
        )
    rope = normalise(parameters.get(FULL, parameters))
    if "rope_theta" not in rope or not isinstance(text.get("max_position_embeddings"), int):
        raise PoSEError(f"{path}/config.json lacks rope_theta or max_position_embeddings; see `pose-plugin check`")
    tokenizer = path / "tokenizer_config.json"
    longest = tokenizer_maximum
    if longest is None and tokenizer.is_file():
        longest = read_json(tokenizer).get("model_max_length")
    return Saved(
        path=path,
        config=config,
        text=text,
        rope=rope,
        maximum=text["max_position_embeddings"],
        tokenizer_maximum=int(longest) if longest else None,
        base=base_of(path) if adapter else None,
        adapter=read_json(path / ADAPTER) if adapter else {},
        record=read_record(path),
    )
