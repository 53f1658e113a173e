"""What a saved folder says about its rope, as the files tell it: nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pose_plugin.checkpoints.adapter import ADAPTER, Base, base_of, is_adapter
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
        tokenizer_maximum: the tokenizer's model_max_length; None where the folder has no tokenizer.
        base: of an adapter, else None.
        adapter: adapter_config.json, {} for a full model.
        record: pose.json, {} where there is none.
        older: whether the folder at `path` is a copy in the form of transformers 4, of which the rest tells as well.
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
        """Whether the rope sits in a text_config, where an engine's overrides of the config do not reach."""
        return self.text is not self.config

    def rope_with(self, **changes: Any) -> dict[str, Any]:
        """All rope parameters, nested by layer type or not, with changes to the layers that see far."""
        parameters: dict[str, Any] = self.text["rope_parameters"]
        if FULL in parameters:
            return {**parameters, FULL: {**parameters[FULL], **changes}}
        return {**parameters, **changes}

    @property
    def overrides(self) -> dict[str, Any]:
        """What a plain base's config lacks, for engines that take it as JSON."""
        return {"rope_parameters": self.text["rope_parameters"], "max_position_embeddings": self.maximum}

    @property
    def extra_attention(self) -> float:
        """The scale of cos and sin as a multiple of YaRN's own 0.1·ln s + 1; 1 for other kinds."""
        if self.kind != "yarn" or not self.rope.get("attention_factor"):
            return 1.0
        return float(self.rope["attention_factor"]) / yarn_attention_factor(self.factor)


def read_saved(folder: str | Path, tokenizer_maximum: int | None = None) -> Saved:
    """
    Args:
        folder: of the model or adapter.
        tokenizer_maximum: where it is known; the tokenizer's file is not read then, as another process may be writing
            it.

    Raises:
        PoSEError: no such folder, no config.json, a config without rope_parameters.
    """
    path = Path(folder)
    if not path.is_dir():
        raise PoSEError(f"{path} is no folder; name the output folder of a training run")
    adapter = is_adapter(path)
    if not (path / "config.json").is_file():
        what = "no config.json beside the adapter" if adapter else "no config.json"
        raise PoSEError(f"{path} has {what}, so its rope is not known; name a folder that a run of this package saved")
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
        raise PoSEError(
            f"{path}/config.json lacks rope_theta or max_position_embeddings; `pose-plugin check` says more"
        )
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
