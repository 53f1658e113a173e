"""Finding and loading what is to be evaluated: a full model, an adapter, or a model with its RoPE stretched.

Everything that can be wrong with a folder is found by `describe`, before any weights are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pose_plugin.checkpoints.adapter import base_of, is_beacons
from pose_plugin.checkpoints.folder import read_record
from pose_plugin.utils.errors import PoSEError


@dataclass
class Source:
    """A model to evaluate, its weights not loaded yet.

    Attributes:
        name: for tables and pictures.
        path: folder of the model or adapter, or a name on the Hugging Face hub.
        base: where the base weights are; the same as `path` for a full model.
        config: the transformers config that the weights are loaded with.
        tokenizer: the model's tokenizer.
        is_adapter: whether `path` holds a PEFT adapter.
        revision: of a base on the hub, where the adapter names one.
        condenses: whether it is one of Activation Beacon, which reads beyond the base's window in pieces within it.
        record: what pose.json in the folder says about the training, {} if there is none.
        notes: what a reader of the results must know.
    """

    name: str
    path: str
    base: str
    config: Any
    tokenizer: Any
    is_adapter: bool = False
    revision: str | None = None
    condenses: bool = False
    record: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def maximum(self) -> int | None:
        """max_position_embeddings in tokens."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    @property
    def facts(self) -> dict[str, Any]:
        """What the report keeps about this model."""
        rope = getattr(self.config.get_text_config(), "rope_parameters", None)
        found = {"path": self.path, "max_position_embeddings": self.maximum, "rope_parameters": rope}
        return {**found, "base": self.base} if self.is_adapter else found


def describe(path: str, name: str | None = None) -> Source:
    """Reads everything about a model but its weights.

    An adapter's own config.json, if there is one, is the config its base model has to be loaded with: the
    adapter was trained on stretched frequencies, which the base folder does not know of.

    Args:
        path: folder of a full model or of a PEFT adapter, or a name on the Hugging Face hub.
        name: for the tables; default: the folder's name.

    Raises:
        PoSEError: no such folder or model, no config, no tokenizer, an adapter without its base model.
    """
    folder = Path(path)
    name = name or folder.resolve().name
    adapter = folder / "adapter_config.json"
    if not adapter.is_file():
        return Source(name, path, path, _config(path), _tokenizer(path), record=read_record(folder))
    found = base_of(folder)
    base, revision = found.name, found.revision
    _peft()
    own = (folder / "config.json").is_file()
    try:
        _config(base, revision)
    except PoSEError as error:
        raise PoSEError(
            f"{path} is an adapter, and its base cannot be had: {error}. Put the base there, or correct "
            f"base_model_name_or_path in {adapter}"
        ) from None
    condenses = is_beacons(folder)
    notes = []
    if not own and not condenses:
        notes.append(
            "the adapter has no config.json beside it, so its base runs with the base's own RoPE; if it "
            "was trained on stretched frequencies, save the extended config into its folder"
        )
    own_tokenizer = (folder / "tokenizer_config.json").is_file()
    return Source(
        name=name,
        path=path,
        base=base,
        config=_config(path) if own else _config(base, revision),
        tokenizer=_tokenizer(path) if own_tokenizer else _tokenizer(base, revision),
        is_adapter=True,
        revision=revision,
        condenses=condenses,
        record=read_record(folder),
        notes=notes,
    )


def extended(source: Source, target_length: int, rope: dict[str, Any], name: str | None = None) -> Source:
    """The same weights with stretched frequencies and no training: what the RoPE alone is worth.

    Args:
        source: a full model.
        target_length: the window to stretch to, in tokens.
        rope: settings as in `rope:`, e.g. {"type": "linear"}.
        name: default: the model's name and the rope's.

    Raises:
        PoSEError: an adapter, or a stretch that `extend_context` refuses.
    """
    from pose_plugin.rope import extend_context

    if source.is_adapter:
        raise PoSEError(f"--extend stretches the first model, and {source.path} is an adapter; put its base first")
    config = extend_context(source.config, target_length, rope)
    name = name or f"{source.name} + {rope.get('type', 'yarn')} (RoPE only)"
    record = {"target_length": target_length}
    return Source(name, source.path, source.base, config, source.tokenizer, record=record)


def load(source: Source, dtype: str = "auto", device: str | None = None) -> Any:
    """The model in evaluation mode, on `device` (default: the accelerator if there is one).

    Raises:
        PoSEError: weights that do not load, PEFT missing.
    """
    import torch
    from transformers import AutoModelForCausalLM

    kind = dtype if dtype == "auto" else getattr(torch, dtype, None)
    if kind != "auto" and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise PoSEError(f"dtype={dtype!r} is unknown; use auto, float32, bfloat16 or float16")
    where = place(device)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            source.base, revision=source.revision or "main", config=source.config, dtype=kind
        )
        if source.is_adapter:
            model = _peft().PeftModel.from_pretrained(model, source.path)
        model.to(where)
        return model.eval()
    except PoSEError:
        raise
    except Exception as error:
        # Of any type: a file that is cut off is a SafetensorError, a library's own.
        said = str(error).strip() or type(error).__name__
        raise PoSEError(f"{source.path} could not be loaded on {where}: {said}; save or copy it again") from error


def place(device: str | None) -> Any:
    """The torch device of a name; the accelerator, if there is one, where none is named.

    Raises:
        PoSEError: torch knows no such device, or it is not in this machine.
    """
    import torch

    try:
        found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=found)
        return found
    except (RuntimeError, AssertionError) as error:
        said = str(error).splitlines()[0]
        raise PoSEError(f"device={device!r} cannot be used here ({said}); name another, e.g. cpu") from error


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise PoSEError("an adapter needs PEFT, which is not installed; pip install peft") from None
    return peft


def _config(path: str, revision: str | None = None) -> Any:
    from transformers import AutoConfig

    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise PoSEError(f"{path} holds neither config.json nor adapter_config.json; name a saved model")
    try:
        return AutoConfig.from_pretrained(path, revision=revision or "main")
    except (OSError, ValueError, KeyError) as error:
        if Path(path).is_dir():
            raise PoSEError(f"{path}/config.json could not be read: {error}") from error
        raise PoSEError(
            f"{path} is no folder here, and no model of that name could be had from the Hugging Face hub; "
            "check the spelling"
        ) from error


def _tokenizer(path: str, revision: str | None = None) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, revision=revision or "main")
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = str(error).strip().splitlines()[0].rstrip(" :") if str(error).strip() else type(error).__name__
        raise PoSEError(f"{path} has no tokenizer that loads; save it beside the model ({said})") from error
