"""An adapter on the base it was trained on, with the frequencies it was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pose_plugin.checkpoints.adapter import base_of, is_adapter
from pose_plugin.checkpoints.folder import read_record
from pose_plugin.utils.errors import PoSEError, RopeMismatchError
from pose_plugin.utils.log import log, show_log


def load_extended(folder: str | Path, *, base: str | None = None, is_trainable: bool = False, **kwargs: Any) -> Any:
    """Loads what a run of this package saved: an adapter on its base, built for the extended window; or a full model.

    `PeftModel.from_pretrained(plain_base, adapter)` would run the adapter at the base's own frequencies.

    Args:
        folder: of the adapter or model; or its name on the Hugging Face hub, which is downloaded.
        base: where the base is, if not where adapter_config.json says.
        is_trainable: whether the adapter shall be trained on.
        kwargs: for `AutoModelForCausalLM.from_pretrained` of the base: dtype, device_map, quantization_config, …

    Returns: a PeftModel, or a transformers model.

    Raises:
        PoSEError: no such folder, an adapter without the extended config beside it, PEFT missing.
        RopeMismatchError: the loaded model's frequencies are not those of its config.

    Example:
        >>> model = load_extended("outputs/adapter", dtype=torch.bfloat16)
        >>> merged = model.merge_and_unload()
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from pose_plugin.rope import verify_rope

    path = _local(folder)
    remote = {key: kwargs[key] for key in ("trust_remote_code",) if key in kwargs}
    if not is_adapter(path):
        if not (path / "config.json").is_file():
            raise PoSEError(f"{path} holds neither config.json nor adapter_config.json; name a saved model or adapter")
        model: Any = AutoModelForCausalLM.from_pretrained(path, **kwargs)
        verify_rope(model)
        return model
    try:
        from peft import PeftModel
    except ImportError:
        raise PoSEError("an adapter needs PEFT, which is not installed; pip install peft") from None
    if not (path / "config.json").is_file():
        raise PoSEError(
            f"{path} has no config.json beside its adapter, so the frequencies it was trained with are not known. Copy "
            "the file from the output folder of the run; or, where none is left, build the base from "
            "extend_context(config, target_length=…, rope=…) as in training and call PeftModel.from_pretrained"
        )
    where = base_of(path, base)
    config = kwargs.pop("config", None) or AutoConfig.from_pretrained(path, **remote)
    if where.revision and "revision" not in kwargs:
        kwargs["revision"] = where.revision
    bare = AutoModelForCausalLM.from_pretrained(where.name, config=config, **kwargs)
    model = PeftModel.from_pretrained(bare, str(path), is_trainable=is_trainable)
    require_extension(model, path)
    return model


def require_extension(model: Any, adapter: str | Path) -> None:
    """Checks that a live model has the frequencies and the window that an adapter was trained with.

    Args:
        model: a built model, with or without the adapter on it.
        adapter: its folder.

    Raises:
        RopeMismatchError: with the first frequency that differs; `load_extended` loads it right.
        PoSEError: the folder has no extended config.
    """
    from transformers import AutoConfig

    from pose_plugin.rope import verify_rope

    path = Path(adapter)
    if not (path / "config.json").is_file():
        raise PoSEError(f"{path} has no config.json, so the frequencies it was trained with are not known")
    wanted = AutoConfig.from_pretrained(path)
    try:
        verify_rope(model, wanted)
    except RopeMismatchError as error:
        record = read_record(path)
        target = record.get("target_length") or wanted.get_text_config().max_position_embeddings
        raise RopeMismatchError(
            f"the adapter {path} was trained for {target} tokens, and this base model is not built for that: {error}\n"
            f"Load both with pose_plugin.load_extended({str(path)!r}), or the base with config=AutoConfig."
            f"from_pretrained({str(path)!r})"
        ) from None


def warn_of_plain_base(model: Any, adapter: str | Path) -> None:
    """Logs what `require_extension` finds; called by the hook in PEFT, see `pose_plugin._autoload`."""
    try:
        require_extension(model, adapter)
    except RopeMismatchError as error:
        show_log()
        log.warning("%s", error)
    except Exception:
        # Loading a model is PEFT's business, and no reason of ours may stop it.
        return


def _local(folder: str | Path) -> Path:
    path = Path(folder)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(folder)))
    except Exception as error:
        raise PoSEError(
            f"{folder} is no folder here, and no model of that name could be had from the Hugging Face hub ({error}); "
            "check the spelling"
        ) from None
