"""Read the files of a saved model or adapter, without loading its weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pose_plugin.checkpoints.schema import Adapter, Config, Generation, Part, Record, Tokenizer, parsed, read
from pose_plugin.rope.kinds import normalise, yarn_attention_factor
from pose_plugin.rope.read import FULL, far_rope, text_config
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import read_json

RECORD = "pose.json"
ADAPTER = "adapter_config.json"
_TOKENIZERS = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")
# transformers writes 10**30 for a tokenizer without a limit.
NO_LIMIT = 10**18
# Most families' classes have this base if their config names none.
USUAL_THETA = 10000.0
# Kinds of rope that cannot be computed without original_max_position_embeddings.
NEED_ORIGINAL = ("yarn", "llama3", "longrope")
_BEACON = "POSE_PLUGIN_BEACON"


@dataclass(frozen=True)
class Base:
    """Where the base's weights are: a folder, or a name on the Hugging Face hub and its revision."""

    name: str
    revision: str | None = None


@dataclass(frozen=True)
class Saved:
    """A model or adapter on disk. Each file is read when it is first needed, once, by its schema.

    Attributes:
        path: its folder.
        printed, printed_base: the folder and the base that printed lines name, if they are others than the real ones.
        gguf: the GGUF file that they name, if it is not in the folder.
        known_limit: the tokenizer's model_max_length, if the caller knows it; the tokenizer's file, which another
            process may be writing, is then not read.
    """

    path: Path
    printed: Path | None = None
    printed_base: str | None = None
    known_limit: int | None = None
    gguf: Path | None = None

    # The files. None if the folder does not have one.

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """config.json as it is; its values have the types that `Config` declares."""
        file = self.path / "config.json"
        if not file.is_file():
            return None
        values = read_json(file)
        parsed(values, Config, str(file))
        return values

    @cached_property
    def adapter(self) -> Adapter | None:
        return self._read(ADAPTER, Adapter)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return self._read("tokenizer_config.json", Tokenizer)

    @cached_property
    def generation(self) -> Generation | None:
        return self._read("generation_config.json", Generation)

    @cached_property
    def record(self) -> Record | None:
        return self._read(RECORD, Record)

    def _read(self, name: str, schema: type[Part]) -> Any:
        return read(self.path / name, schema) if (self.path / name).is_file() else None

    # What they say.

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def shown(self) -> Path:
        """The folder as printed lines name it."""
        return self.printed or self.path

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder holds a tokenizer; adapters of other trainers often hold none."""
        return any((self.path / name).is_file() for name in _TOKENIZERS)

    @property
    def condenses(self) -> bool:
        """Whether it is an Activation Beacon adapter, which leaves the model's window as it is."""
        return self.adapter is not None and self.adapter.peft_type == _BEACON

    @cached_property
    def base(self) -> Base | None:
        """The base of an adapter; None for a full model."""
        return None if self.adapter is None else base_of(self.path)

    @cached_property
    def text(self) -> dict[str, Any]:
        """The part of config.json that holds the rope.

        Raises:
            PoSEError: the folder has no config.json, as adapters of other trainers.
        """
        if self.config is None:
            raise PoSEError(
                f"{self.path} has no config.json next to its adapter, so the window and the rope that it was trained "
                "with are unknown. Copy the file there: that of the trained model, or that of its base if the base "
                "was trained as it is"
            )
        return text_part(self.config)

    @cached_property
    def rope_parameters(self) -> dict[str, Any]:
        """All rope parameters in the form of transformers 5, nested by layer type or not.

        Raises:
            PoSEError: the config has none in any form.
        """
        text = self.text
        new, old = text.get("rope_parameters") or {}, text.get("rope_scaling") or {}
        # As transformers 5 reads them: the older form replaces the other one as a whole, base included.
        found = {**new, FULL: {**new[FULL], **old}} if isinstance(new.get(FULL), dict) else old or new
        if not found and self._theta is None and text.get("max_position_embeddings") is None:
            raise PoSEError(
                f"{self.path}/config.json has neither rope_parameters nor rope_theta nor max_position_embeddings; "
                "name the folder of a model with rotary positions"
            )
        return self._normalised(found)

    @property
    def newer_parameters(self) -> dict[str, Any]:
        """All rope parameters of the key `rope_parameters` alone."""
        return self._normalised(self.text.get("rope_parameters") or {})

    def _normalised(self, found: dict[str, Any]) -> dict[str, Any]:
        if isinstance(found.get(FULL), dict):
            found = {key: normalise(value) if isinstance(value, dict) else value for key, value in found.items()}
            return {**found, FULL: self._complete(found[FULL])}
        return self._complete(found)

    def _complete(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return one flat rope dict with what is stated next to it."""
        rope = normalise(found)
        if rope.get("rope_theta") is None:
            rope["rope_theta"] = float(self._theta or USUAL_THETA)
        return self._with_original(rope, NEED_ORIGINAL)

    def _with_original(self, rope: dict[str, Any], kinds: tuple[str, ...]) -> dict[str, Any]:
        """Phi-3 and its relatives state the original window next to the rope dict, and that counts."""
        original = self.text.get("original_max_position_embeddings")
        if original is None or rope["rope_type"] not in kinds:
            return rope
        return {**rope, "original_max_position_embeddings": original}

    @property
    def _theta(self) -> Any:
        """The base that is stated next to the rope dicts, if any."""
        return self.text.get("rope_theta") or self.text.get("rotary_emb_base")

    @cached_property
    def rope(self) -> dict[str, Any]:
        """The flat rope dict of the layers that see far."""
        return far_rope(self.rope_parameters)

    @property
    def maximum(self) -> int:
        """max_position_embeddings, tokens.

        Raises:
            PoSEError: the config has none.
        """
        found = self.text.get("max_position_embeddings")
        if not found:
            raise PoSEError(f"{self.path}/config.json has no max_position_embeddings; add the window of the model")
        return int(found)

    @property
    def target(self) -> int:
        """The window that was trained, tokens: that of the record, or the config's maximum."""
        return self.record.target_length if self.record else self.maximum

    @property
    def original(self) -> int | None:
        """The window before the extension, tokens, if any file says it."""
        record = self.record.model.original_length if self.record else None
        origin = self.text.get("pose_plugin") or {}
        return record or origin.get("original_length") or self.rope.get("original_max_position_embeddings")

    @property
    def tokenizer_maximum(self) -> int | None:
        """The tokenizer's model_max_length; None without one, or if it stands for "no limit"."""
        limit = self.known_limit or (self.tokenizer.model_max_length if self.tokenizer else None)
        return int(limit) if limit and limit < NO_LIMIT else None

    @property
    def older_rope(self) -> dict[str, Any]:
        """The flat rope dict that a reader of `rope_theta` and `rope_scaling` alone sees."""
        theta = float(self._theta or USUAL_THETA)
        rope = {**normalise(self.text.get("rope_scaling") or {}), "rope_theta": theta}
        return self._with_original(rope, ("longrope",))

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
    def older(self) -> bool:
        """Whether config.json has the form of transformers 4 only."""
        return "rope_parameters" not in self.text

    @property
    def nested(self) -> bool:
        """Whether the config of the model that an engine loads has its rope in a text_config."""
        whole = self.config
        if self.base is not None and (Path(self.base.name) / "config.json").is_file():
            whole = Saved(Path(self.base.name)).config
        return isinstance((whole or {}).get("text_config"), dict)

    def rope_with(self, **changes: Any) -> dict[str, Any]:
        """Return all rope parameters, nested by layer type or not, with changes to the layers that see far."""
        parameters = self.rope_parameters
        if FULL in parameters:
            return {**parameters, FULL: {**parameters[FULL], **changes}}
        return {**parameters, **changes}

    @property
    def base_name(self) -> str:
        """The base of an adapter as printed lines name it."""
        return self.printed_base or (self.base.name if self.base else "")

    @property
    def extra_attention(self) -> float:
        """Return the scale of cos and sin as a multiple of YaRN's own 0.1·ln s + 1; 1 for other kinds."""
        if self.kind != "yarn" or not self.rope.get("attention_factor"):
            return 1.0
        return float(self.rope["attention_factor"]) / yarn_attention_factor(self.factor)

    @property
    def mscale_attention(self) -> float:
        """Return the scale of cos and sin by `mscale` and `mscale_all_dim` (Ministral 3), divided by 0.1·ln s + 1.

        1 for DeepSeek's attention: every engine has separate code for it.
        """
        scales = [self.rope.get(key) for key in ("mscale", "mscale_all_dim")]
        if self.kind != "yarn" or self.rope.get("attention_factor") or self.text.get("qk_rope_head_dim"):
            return 1.0
        if not all(scales):
            return 1.0
        first, second = (yarn_attention_factor(self.factor, float(scale)) for scale in scales if scale)
        return first / second / yarn_attention_factor(self.factor)

    @property
    def warnings(self) -> list[str]:
        """What users of the folder must know: no training, or no proof of it."""
        if self.record is None:
            return [
                f"{self.shown} has no {RECORD}, so it is unknown what was trained: window and rope are those of "
                "config.json"
            ]
        trained = self.record.trained
        if trained is not None and trained.steps == 0:
            return [
                f"{RECORD} has steps=0: nothing was trained, and the weights are the base's. Look at the log of the "
                "run for the reason (no rows, no batches), and train again"
            ]
        return []


def read_saved(folder: str | Path, known_limit: int | None = None) -> Saved:
    """Return a folder that holds a model or an adapter.

    Args:
        folder: of the model or adapter.
        known_limit: see `Saved`.

    Raises:
        PoSEError: no such folder, or it holds neither.
    """
    path = Path(folder)
    if not path.is_dir():
        raise PoSEError(f"{path} is not a folder; name the output folder of a training run")
    if not (path / "config.json").is_file() and not is_adapter(path):
        raise PoSEError(f"{path} holds neither config.json nor adapter_config.json; name a saved model or adapter")
    return Saved(path, known_limit=known_limit)


def text_part(values: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json's values that holds the rope: the values themselves, or their text_config."""
    inner: dict[str, Any] = text_config(values)
    # A few multimodal configs keep the rope at the top.
    keys = {"rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings"}
    return values if keys & values.keys() and not keys & inner.keys() else inner


def is_adapter(folder: str | Path) -> bool:
    """Return whether a folder holds a PEFT adapter."""
    return (Path(folder) / ADAPTER).is_file()


def base_of(folder: str | Path, base: str | None = None) -> Base:
    """Return the base of an adapter.

    Args:
        folder: holds adapter_config.json.
        base: used instead, e.g. if the base has been moved.

    Raises:
        PoSEError: the adapter names none.
    """
    if base is not None:
        return Base(base)
    file = Path(folder) / ADAPTER
    values = read(file, Adapter)
    name = values.base_model_name_or_path
    if not name:
        raise PoSEError(f"{file} has no base_model_name_or_path; add the path of the base model there")
    # A relative path was relative to where training ran, which may be this folder or one above the adapter's.
    for start in (Path(), *file.resolve().parents):
        if (start / name / "config.json").is_file():
            return Base(str(start / name))
    return Base(name, values.revision or None)


def read_record(folder: str | Path) -> dict[str, Any]:
    """Return what `complete_folder` recorded in a folder; {} without a record.

    Raises:
        PoSEError: the record is damaged.
    """
    record = Saved(Path(folder)).record
    return {} if record is None else record.model_dump(exclude_unset=True)


def require_peft() -> Any:
    """Return the module `peft`.

    Raises:
        PoSEError: it is not installed.
    """
    try:
        import peft
    except ImportError:
        raise PoSEError("an adapter needs PEFT, which is not installed; pip install peft") from None
    return peft


def public_name(name: str) -> str:
    """Return a model's or a data set's name as it may be published: a hub name stays, a path becomes its last part.

    Example:
        >>> public_name("/home/me/models/tiny"), public_name("meta-llama/Llama-2-7b-hf")
        ('tiny', 'meta-llama/Llama-2-7b-hf')
        >>> public_name("/home/me/.cache/huggingface/hub/models--org--name/snapshots/1a2b")
        'org/name'
    """
    parts = name.replace("\\", "/").rstrip("/").split("/")
    for part in parts:
        kind, *owner = part.split("--")
        if kind in ("models", "datasets") and owner:
            return "/".join(owner)
    is_hub_name = len(parts) <= 2 and "" not in parts and parts[0] not in (".", "..", "~") and not Path(name).exists()
    return name if is_hub_name else parts[-1] or parts[0]
