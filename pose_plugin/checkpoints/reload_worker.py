"""Measure what a user without this package gets from a saved folder.

As a script it loads the folder with plain transformers, in a process that cannot import this package. So this file
imports nothing of it. `measure` also asks the trained model.

    python reload_worker.py request.json answer.json
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Wrappers add these to the names of modules.
_WRAPPERS = ("base_model.model.", "_orig_mod.", "_fsdp_wrapped_module.", "module.")


@contextmanager
def still(model: Any) -> Iterator[None]:
    """Turn dropout off by setting flags: `eval()` would make 4-bit layers on a CPU repack their weights for good."""
    states = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in states:
            module.training = type(module).__module__.startswith("bitsandbytes")
        yield
    finally:
        for module, training in states:
            module.training = training


def measure(
    model: Any, probe: dict[str, Any], forward: Callable[..., Any] | None = None, device: Any = None
) -> dict[str, Any]:
    """Compute logits at far positions, and read the frequencies that made them.

    Args:
        model: a causal language model, wrapped or not; its modes are left as they are.
        probe: `ids` and `positions`, n each, and `vocabulary`, the v token ids whose logits are kept.
        forward: called instead of the model, e.g. the model as a distributed framework has wrapped it.
        device: of the input; default: that of the embeddings.

    Returns:
        `logits` [n, v], `logsumexp` [n] over the whole vocabulary, and `frequencies`: for each rotary buffer's
        name its values and the scale of cos and sin. Buffers are read after the forward, as some change with the
        positions of a batch.
    """
    import torch

    device = device or model.get_input_embeddings().weight.device
    ids = torch.tensor([probe["ids"]], device=device)
    positions = torch.tensor([probe["positions"]], device=device)
    with still(model), torch.no_grad():
        # With a mask: without one, transformers takes a jump in the positions as the start of another document.
        out = (forward or model)(
            input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False
        )
        logits = out.logits[0].float().cpu()
    return {
        "logits": [[_short(value) for value in row] for row in logits[:, probe["vocabulary"]].tolist()],
        "logsumexp": [_short(value) for value in logits.logsumexp(dim=-1).tolist()],
        "frequencies": {
            _name(name, key): {
                "inv_freq": [_short(value) for value in tensor.float().cpu().flatten().tolist()],
                "scale": float(getattr(module, key.replace("inv_freq", "attention_scaling"), 1.0) or 1.0),
            }
            for name, module, key, tensor in rotary_buffers(model)
        },
    }


def rotary_buffers(model: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield (module's name, module, buffer's name, buffer) for every buffer of inverse frequencies in use."""
    for name, module in model.named_modules():
        for key, tensor in module.named_buffers(recurse=False):
            if key.endswith("inv_freq") and not key.endswith("original_inv_freq"):
                yield name, module, key, tensor


def weight_type(model: Any) -> str:
    """Return the type of most weights, an adapter's aside, e.g. "bfloat16"."""
    sizes: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and "lora_" not in name:
            # Under ZeRO-3 a parameter is empty, and ds_numel is its full size.
            size = getattr(parameter, "ds_numel", parameter.numel())
            sizes[str(parameter.dtype)] = sizes.get(str(parameter.dtype), 0) + size
    return max(sizes, key=lambda key: sizes[key]).replace("torch.", "") if sizes else "float32"


def _name(module: str, key: str) -> str:
    for wrapper in _WRAPPERS:
        module = module.replace(wrapper, "")
    return f"{module}.{key}"


def _short(value: float) -> float:
    # float32 has no more digits than these.
    return float(f"{value:.8g}") if math.isfinite(value) else value


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Load and measure what the request names; `error` is the reason if it does not load."""
    found: dict[str, Any] = {}
    try:
        _load_and_measure(request, found)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def _load_and_measure(request: dict[str, Any], answer: dict[str, Any]) -> None:
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder, base = request["folder"], request["base"]
    remote = {"trust_remote_code": True} if request["trust_remote_code"] else {}
    answer["transformers"] = transformers.__version__
    try:
        limit = AutoTokenizer.from_pretrained(folder, **remote).model_max_length
        answer["tokenizer"] = int(min(limit, 10**30))  # it may be infinite
    except Exception as error:
        answer["tokenizer_error"] = f"{type(error).__name__}: {error}"
    config = AutoConfig.from_pretrained(folder, **remote)
    answer["maximum"] = getattr(config.get_text_config(), "max_position_embeddings", None)
    probe = request["probe"]
    options: dict[str, Any] = dict(remote)
    if request["quantization"]:
        options["quantization_config"] = request["quantization"]
    if base is not None and request["revision"]:
        options["revision"] = request["revision"]
    dtype = request["dtype"]
    key = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    options[key] = dtype if dtype == "auto" else getattr(torch, dtype)
    options["output_loading_info"] = True
    loaded: Any = AutoModelForCausalLM.from_pretrained(base or folder, config=config, **options)
    model, info = loaded
    answer["missing"] = sorted(info["missing_keys"])
    if base is not None:
        from peft import PeftModel

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = PeftModel.from_pretrained(model, folder)
        answer["missing"] += [str(each.message) for each in caught if "missing adapter keys" in str(each.message)]
    if probe is None:
        return
    if not request["quantization"]:
        model = model.to(request["device"])
    answer.update(measure(model, probe), dtype=weight_type(model))
    answer["generates"] = _refusal_of_generate(model, probe["ids"][-1], request["prompt"])
    if request["theta"]:
        answer["plain"] = _with_plain_frequencies(model, probe, request["theta"])


class _Reached(Exception):
    """The forward was reached."""


def _refusal_of_generate(model: Any, token: int, length: int) -> str | None:
    """Return why `generate` refuses a prompt of a length in tokens, None if it starts. No forward is computed."""
    import functools

    import torch

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    forward = inner.forward

    @functools.wraps(forward)  # generate looks at the signature
    def reached(*args: Any, **kwargs: Any) -> None:
        raise _Reached

    ids = torch.full((1, length), token, device=model.get_input_embeddings().weight.device)
    inner.forward = reached
    try:
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=token)
    except _Reached:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        inner.forward = forward
    return None


def _with_plain_frequencies(model: Any, probe: dict[str, Any], theta: float) -> list[list[float]] | None:
    """Return the logits as if the extension were lost. The model cannot be used afterwards."""
    import torch

    found = False
    for _, module, key, tensor in list(rotary_buffers(model)):
        if "sliding" in key:
            continue
        half = tensor.numel()
        exponents = torch.arange(half, dtype=torch.float32, device=tensor.device) / half
        tensor.copy_(torch.pow(float(theta), -exponents).reshape(tensor.shape))
        setattr(module, key.replace("inv_freq", "attention_scaling"), 1.0)
        if isinstance(getattr(module, "rope_type", None), str):
            # Otherwise longrope restores its own list at the next forward.
            module.rope_type = "default"
        found = True
    return measure(model, probe)["logits"] if found else None


class _Blocked:
    """Block imports of the package."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == "pose_plugin":
            raise ModuleNotFoundError(f"{name} is blocked here", name=name)


def main() -> None:
    # The folder of this script is first on the path, and has modules with common names.
    sys.path.pop(0)
    sys.meta_path.insert(0, _Blocked())
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(answer(request), file)


if __name__ == "__main__":
    main()
