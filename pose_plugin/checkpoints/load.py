"""Load models to use or to evaluate: full models, adapters on their base, and bases with a stretched rope.

`load_extended` loads what a run saved. `describe` reads everything about any model but its weights and raises what is
wrong with it; `load` then loads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pose_plugin.checkpoints.lengths import UNSET_GENERATION
from pose_plugin.checkpoints.saved import ADAPTER, Saved, base_of, public_name, read_record, read_saved, require_peft
from pose_plugin.utils.errors import PoSEError, RopeMismatchError, first_line
from pose_plugin.utils.log import log, show_log
from pose_plugin.utils.tables import counted


def load_extended(folder: str | Path, *, base: str | None = None, is_trainable: bool = False, **kwargs: Any) -> Any:
    """Load what a run of this package saved: an adapter on its base, built for the extended window, or a full model.

    `PeftModel.from_pretrained(plain_base, adapter)` would run the adapter at the base's own frequencies.

    Args:
        folder: of the adapter or model; or its name on the Hugging Face hub, from which it is downloaded.
        base: where the base is, if not where adapter_config.json says.
        is_trainable: whether to train the adapter further.
        kwargs: for `AutoModelForCausalLM.from_pretrained` of the base: dtype, device_map, quantization_config, …

    Returns: a PeftModel, or a transformers model.

    Raises:
        PoSEError: no such folder, an adapter without the extended config next to it, PEFT missing.
        RopeMismatchError: the loaded model's frequencies are not those of its config.

    Examples:
        >>> model = load_extended("outputs/adapter", dtype=torch.bfloat16)
        >>> merged = model.merge_and_unload()
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from pose_plugin.rope import verify_rope

    saved = read_saved(local_folder(folder))
    path = saved.path
    if saved.adapter is None:
        if base is not None:
            raise PoSEError(f"base={base!r} has no effect: {path} holds a full model and no adapter. Remove base")
        model: Any = AutoModelForCausalLM.from_pretrained(path, **kwargs)
        verify_rope(model)
        return model
    peft = require_peft()
    if saved.config is None:
        raise PoSEError(
            f"{path} has no config.json next to its adapter, so the frequencies it was trained with are unknown. Copy "
            "the file from the output folder of the run; or, if it is lost, build the base from "
            "extend_context(config, target_length=…, rope=…) as in training and call PeftModel.from_pretrained"
        )
    where = base_of(path, base)
    remote = {key: kwargs[key] for key in ("trust_remote_code",) if key in kwargs}
    config = kwargs.pop("config", None) or AutoConfig.from_pretrained(path, **remote)
    if where.revision:
        kwargs.setdefault("revision", where.revision)
    bare = AutoModelForCausalLM.from_pretrained(where.name, config=config, **kwargs)
    model = peft.PeftModel.from_pretrained(bare, str(path), is_trainable=is_trainable)
    require_extension(model, path)
    longest = model.generation_config.max_length
    if longest is not None and UNSET_GENERATION < longest < saved.target:
        # It comes from the base, and `generate` would refuse prompts beyond the base's window.
        model.generation_config.max_length = saved.target
    return model


def require_extension(model: Any, adapter: str | Path) -> None:
    """Check that a live model has the frequencies and the window that an adapter was trained with.

    Args:
        model: a built model, with or without the adapter on it.
        adapter: its folder, with the extended config.

    Raises:
        RopeMismatchError: naming the first frequency that differs.
    """
    from transformers import AutoConfig

    from pose_plugin.rope import verify_rope

    wanted = AutoConfig.from_pretrained(adapter)
    try:
        verify_rope(model, wanted)
    except RopeMismatchError as error:
        target = read_record(adapter).get("target_length") or wanted.get_text_config().max_position_embeddings
        raise RopeMismatchError(
            f"the adapter {adapter} was trained for {target} tokens, and this base model is not built for them: "
            f"{error}\nLoad both with pose_plugin.load_extended({str(adapter)!r}), or the base with config=AutoConfig."
            f"from_pretrained({str(adapter)!r})"
        ) from None


def warn_of_plain_base(model: Any, adapter: str | Path) -> None:
    """Log what `require_extension` finds; called by the hook in PEFT, see `pose_plugin._autoload`."""
    try:
        require_extension(model, adapter)
    except RopeMismatchError as error:
        show_log()
        log.warning("%s", error)
    except Exception:
        # Never break a load by PEFT: the adapter may be damaged or need code that this look at it does not allow.
        return


def local_folder(folder: str | Path) -> Path:
    """Return a folder, or where a model of the Hugging Face hub was downloaded to. Raise PoSEError if there is none."""
    path = Path(folder)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(folder)))
    except Exception as error:
        raise _not_found(folder, error) from error


def _not_found(path: str | Path, error: Exception) -> PoSEError:
    return PoSEError(
        f"{path} is not a folder, and the Hugging Face hub gives no model of that name ({first_line(error)}); "
        "check the spelling, or log in with `hf auth login` if the model needs it"
    )


# -- models to evaluate ------------------------------------------------------------------------------------------------


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
        revision: of weights on the hub, the commit or what the adapter names; of served ones, what the server states.
        condenses: whether it is an Activation Beacon adapter, which reads long texts in pieces.
        record: pose.json in the folder, {} if missing.
        notes: for readers of the results.
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
    def original(self) -> int | None:
        """The window before this package stretched the model; `maximum` if it did not."""
        from pose_plugin.rope.read import original_length

        return original_length(self.config) or self.maximum

    @property
    def facts(self) -> dict[str, Any]:
        """What the report keeps about this model."""
        rope = getattr(self.config.get_text_config(), "rope_parameters", None)
        # Names and not paths: `pose-plugin card` publishes them with the model.
        found = {"path": public_name(self.path), "max_position_embeddings": self.maximum, "rope_parameters": rope}
        return {**found, "base": public_name(self.base)} if self.is_adapter else found


def describe(path: str, name: str | None = None) -> Source:
    """Read everything about a model but its weights.

    The base of an adapter is loaded with the config next to the adapter, if there is one: it has the stretched
    frequencies that the adapter was trained on.

    Args:
        path: folder of a full model or of a PEFT adapter, or a name on the Hugging Face hub.
        name: for the tables; default: the folder's name.

    Raises:
        PoSEError: no such folder or model, no config, no tokenizer, an adapter without its base model.
    """
    saved = Saved(Path(path))
    name = name or saved.name
    if saved.adapter is None:
        config = _config(path)
        return Source(name, path, path, config, _tokenizer(path), record=read_record(path), revision=_commit(config))
    require_peft()
    found = base_of(path)
    try:
        config = _config(found.name, found.revision)
    except PoSEError as error:
        raise PoSEError(
            f"{path} is an adapter, and its base cannot be loaded: {error}. Put the base there, or correct "
            f"base_model_name_or_path in {saved.path / ADAPTER}"
        ) from None
    own, notes = saved.config is not None, []
    if not own and not saved.condenses:
        notes.append(
            "the adapter has no config.json next to it, so its base runs with the base's own RoPE; if it was trained "
            "on stretched frequencies, save the extended config into its folder"
        )
    return Source(
        name=name,
        path=path,
        base=found.name,
        config=_config(path) if own else config,
        tokenizer=_tokenizer(path) if saved.tokenizer else _tokenizer(found.name, found.revision),
        is_adapter=True,
        revision=_commit(config) or found.revision,
        condenses=saved.condenses,
        record=read_record(path),
        notes=notes,
    )


def extended(source: Source, target_length: int, rope: dict[str, Any], name: str | None = None) -> Source:
    """Return the same weights with stretched frequencies, to measure what the RoPE alone does without training.

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
    return replace(source, name=name, config=config, record=record, notes=[])


def load(source: Source, dtype: str = "auto", device: str | None = None) -> Any:
    """Load a model in evaluation mode, on `device` (default: the accelerator if there is one).

    Raises:
        PoSEError: weights that do not load or are missing, PEFT missing.
    """
    import warnings

    from transformers import AutoModelForCausalLM

    kind = kind_of(dtype)
    where = place(device)
    peft = require_peft() if source.is_adapter else None
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.base,
            revision=source.revision or "main",
            config=source.config,
            dtype=kind,
            output_loading_info=True,
        )
        model, found = loaded
        # Random numbers would take their place, and be measured.
        if missing := sorted(found["missing_keys"]):
            raise ValueError(f"{counted(len(missing), 'weight')} missing from {source.base}, the first {missing[0]}")
        if peft is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", ".*missing adapter keys")
                model = peft.PeftModel.from_pretrained(model, source.path)
        model.to(where)
        return model.eval()
    except PoSEError:
        raise
    except Exception as error:
        # Any type: a truncated file raises the safetensors library's own SafetensorError.
        reason = str(error).strip() or type(error).__name__
        raise PoSEError(f"{source.path} could not be loaded on {where}: {reason}; save or copy it again") from error


def kind_of(dtype: str) -> Any:
    """Return the torch dtype of a name; "auto" stands for itself.

    Raises:
        PoSEError: there is no such floating-point type.
    """
    import torch

    kind = dtype if dtype == "auto" else getattr(torch, dtype, None)
    if kind != "auto" and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise PoSEError(f"dtype={dtype!r} is unknown; use auto, float32, bfloat16 or float16")
    return kind


def place(device: str | None) -> Any:
    """Return the torch device of a name, by default the accelerator if there is one.

    Raises:
        PoSEError: torch does not know the device, or this machine does not have it.
    """
    import torch

    try:
        found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=found)
        return found
    except (RuntimeError, AssertionError) as error:
        raise PoSEError(
            f"device={device!r} cannot be used here ({first_line(error)}); name another, e.g. cpu"
        ) from error


def _config(path: str, revision: str | None = None) -> Any:
    from transformers import AutoConfig

    if Path(path).is_dir():
        read_saved(path)
    try:
        return AutoConfig.from_pretrained(path, revision=revision or "main")
    except Exception as error:
        # Each family validates its fields with its own errors. OSError is what a hub without such a model gives.
        if Path(path).is_dir() or not isinstance(error, OSError):
            raise PoSEError(f"{path}/config.json could not be read: {' '.join(str(error).split())}") from error
        raise _not_found(path, error) from error


def _commit(config: Any) -> str | None:
    """Return the commit of the hub that a config was read at: a name alone may mean other weights tomorrow."""
    return getattr(config, "_commit_hash", None)


def _tokenizer(path: str, revision: str | None = None) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, revision=revision or "main")
    except Exception as error:
        # The tokenizers library raises plain Exceptions for a file that it does not know.
        raise PoSEError(
            f"{path} has no tokenizer that loads; save it next to the model ({first_line(error)})"
        ) from error
