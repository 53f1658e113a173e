"""Compare a built model's rotary buffers with the closed form, and restore them.

Everything between a config and the buffers can fail silently: the config is changed after the model was built, a loader
drops the theta, a cast turns the buffer into bf16, a meta device leaves it unfilled. So the live numbers are compared.
No checkpoint holds these buffers, so nothing else restores them. Weights are neither read nor written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pose_plugin.rope.kinds import Frequencies, inverse_frequencies, normalise
from pose_plugin.rope.live import RotaryBuffer, rebuilt, rotary_buffers
from pose_plugin.rope.plan import RopePlan
from pose_plugin.rope.read import FULL, far_rope, lookup, text_config
from pose_plugin.rope.source import read_rope
from pose_plugin.utils.errors import RopeMismatchError
from pose_plugin.utils.models import unwrap

# DeepSpeed casts the whole module to these, FSDP 1 casts buffers in its first forward.
_COARSE = ("torch.bfloat16", "torch.float16")
_REBUILD = (
    "inv_freq is made when the model is built: change the config first and build from it, e.g. "
    "AutoModelForCausalLM.from_pretrained(base, config=extend_context(config, target_length))"
)


@dataclass(frozen=True)
class RopeCheck:
    """One rotary buffer that agreed."""

    module: str
    layer_type: str | None
    rope_type: str
    frequencies: int
    worst_difference: float  # relative, over the dimensions
    attention_factor: float


@dataclass(frozen=True)
class RopeReport:
    """All buffers that were compared; exists only if all agreed."""

    checks: tuple[RopeCheck, ...]
    max_position_embeddings: int

    def __str__(self) -> str:
        lines = [
            f"{check.module}{f' ({check.layer_type})' if check.layer_type else ''}: {check.rope_type}, "
            f"{check.frequencies} frequencies, largest relative difference {check.worst_difference:.1e}, "
            f"attention factor {check.attention_factor:g}"
            for check in self.checks
        ]
        return "\n".join([*lines, f"window {self.max_position_embeddings}"])


@dataclass(frozen=True)
class _Expected:
    parameters: dict[str, Any]
    maximum: int
    rotary_dim: int | None
    fixed: bool


def verify_rope(model: Any, expected: Any = None) -> RopeReport:
    """Compare every rotary module of a built model with the float64 closed form.

    Args:
        model: a transformers model, wrapped (PEFT, DDP) or not. Weights may be on meta, sharded or quantised: only the
            rotary buffers are read.
        expected: a RopePlan, a config (object or dict), or complete rope parameters. Default: the model's own config,
            which finds models that were built before it was changed.

    Returns: a report of the buffers that were compared.

    Raises:
        RopeMismatchError: naming the module, the first differing dimension, the value, the expected value and a fix.
    """
    model = unwrap(model)
    text = text_config(model.config)
    wanted = _expected(text if expected is None else expected, text)
    _check_config(text, wanted)
    buffers = rotary_buffers(model, text, tables=wanted.fixed, nested=FULL in wanted.parameters)
    checks = [_check(live, wanted) for live in buffers]
    if not checks:
        raise RopeMismatchError(
            f"{type(model).__name__} has no rotary module with inverse frequencies, so the rope cannot be verified; is "
            "it a RoPE model?"
        )
    return RopeReport(tuple(checks), int(text.max_position_embeddings))


def restore_rope(model: Any, only_coarse: bool = False) -> list[str]:
    """Recompute the buffers of every rotary module from its config, in float32 and on the same device.

    Use it after a cast of the whole model (DeepSpeed in bf16 or fp16, FSDP 1) or after `to_empty`.

    Args:
        model: a transformers model, wrapped or not. Only rotary buffers are changed.
        only_coarse: skip buffers that are not bfloat16 or float16, with any values.

    Returns: the names of the restored buffers. A module that cannot be built from its config alone is skipped;
        `verify_rope` reports it.
    """
    restored = []
    home = next((p.device for p in model.parameters() if p.device.type != "meta"), "cpu")
    for name, module in model.named_modules():
        old = {key: buffer for key, buffer in module.named_buffers(recurse=False) if key.endswith("inv_freq")}
        if only_coarse:
            old = {key: buffer for key, buffer in old.items() if str(buffer.dtype) in _COARSE}
        if not old or not hasattr(module, "config"):
            continue
        fresh = rebuilt(module)
        for key, buffer in old.items():
            new = getattr(fresh, key, None)
            if new is not None and new.shape == buffer.shape:
                setattr(module, key, new.detach().float().to(home if buffer.is_meta else buffer.device))
                restored.append(f"{name}.{key}" if name else key)
    return restored


def tolerance(parameters: Mapping[str, Any]) -> float:
    """Return the largest relative difference allowed between float32 frequencies and the float64 closed form.

    transformers computes base^(2i/d) in float32: rounding the exponent costs ln(base)·2^−24, and in a blended pair
    (1 − r)·θ + r·θ/s magnifies the rounding of r by s. With room for the operations around it this gives
    2^−22·(4 + ln base + s): 4e-6 for plain RoPE, 2e-5 at s = 64. bf16 (2^−9) or a wrong setting changes a hundred times
    as much.
    """
    stretch = max([float(parameters.get("factor") or 1.0), *map(float, parameters.get("long_factor") or [])])
    return 2.0**-22 * (4.0 + math.log(float(parameters["rope_theta"])) + stretch)


def _expected(source: Any, text: Any) -> _Expected:
    if isinstance(source, RopePlan):
        return _Expected(source.rope_parameters, source.max_position_embeddings, source.rotary_dim, source.fixed)
    nested = isinstance(source, Mapping) and isinstance(source.get(FULL), Mapping)
    if isinstance(source, Mapping) and ("rope_type" in source or "type" in source or nested):
        parameters = {k: normalise(v) for k, v in source.items() if v} if nested else normalise(source)
        return _Expected(parameters, int(text.max_position_embeddings), None, False)
    read = read_rope(source)
    return _Expected(read.parameters, read.max_position_embeddings, read.rotary_dim, read.fixed)


def _check_config(text: Any, wanted: _Expected) -> None:
    if text.max_position_embeddings < wanted.maximum:
        raise RopeMismatchError(
            f"the model's max_position_embeddings={text.max_position_embeddings} is below the expected "
            f"{wanted.maximum}. {_REBUILD}"
        )
    copied = vars(text).get("rope_scaling")
    inner = far_rope(lookup(text, "rope_parameters"))
    if copied and inner and normalise(copied) != normalise(inner):
        raise RopeMismatchError(
            f"the config holds two different ropes: rope_parameters={inner} and, for older readers, rope_scaling="
            f"{copied}; a reload takes the second. Use extend_context instead of editing rope_parameters"
        )


def _check(live: RotaryBuffer, wanted: _Expected) -> RopeCheck:
    parameters = wanted.parameters
    if live.layer_type is not None and FULL in parameters:
        if live.layer_type not in parameters:
            raise RopeMismatchError(
                f"{live.name} is for layer type {live.layer_type!r}, but the expected rope has {sorted(parameters)}. "
                f"{_REBUILD}"
            )
        parameters = parameters[live.layer_type]
    got = _frequencies_of_table(live, wanted) if wanted.fixed else _read(live.name, live.tensor)
    dim = 2 * got.size
    if wanted.rotary_dim not in (None, dim) and live.layer_type in (None, FULL):
        raise RopeMismatchError(
            f"{live.name} has {got.size} frequencies, but the config's rotary dimension is {wanted.rotary_dim}, which "
            f"needs {wanted.rotary_dim // 2}. {_REBUILD}"
        )
    kind, rtol = parameters["rope_type"], tolerance(parameters)
    candidates = _candidates(parameters, dim, wanted.maximum)
    # longrope swaps its buffer between two lists as batches pass; either is right, a mixture is not.
    differences = [_difference(got, want) for want, _ in candidates]
    best = min(range(len(candidates)), key=lambda n: (np.count_nonzero(differences[n] > rtol), differences[n].max()))
    (want, attention), difference = candidates[best], differences[best]
    if difference.max() > rtol:
        first = int(np.argmax(difference > rtol))
        raise RopeMismatchError(
            f"{live.name}[{first}] is {got[first]:.9g}, but {kind} with theta {parameters['rope_theta']:g} needs "
            f"{want[first]:.9g} (relative difference {difference[first]:.1e}, allowed {rtol:.1e}). {_REBUILD}. If the "
            "model left the meta device by to_empty, call pose_plugin.rope.restore_rope(model) instead"
        )
    if live.original is not None and kind == "longrope":
        start = _difference(_read(live.name, live.original), candidates[0][0]).max()
        if start > rtol:
            raise RopeMismatchError(
                f"{live.name}: the buffer for short batches differs from short_factor's frequencies by {start:.1e} "
                f"(allowed {rtol:.1e}). {_REBUILD}"
            )
    scale = 1.0 if live.attention_factor is None else float(live.attention_factor)
    if not math.isclose(scale, attention, rel_tol=1e-6):
        raise RopeMismatchError(
            f"{live.name}: cos and sin are scaled by {scale:.9g}, but {kind} needs {attention:.9g}. {_REBUILD}"
        )
    return RopeCheck(live.name, live.layer_type, kind, got.size, float(difference.max()), scale)


def _candidates(parameters: Mapping[str, Any], dim: int, maximum: int) -> list[tuple[Frequencies, float]]:
    if parameters["rope_type"] != "longrope":
        return [inverse_frequencies(parameters, dim, max_position_embeddings=maximum)]
    original = int(parameters["original_max_position_embeddings"])
    return [
        inverse_frequencies(parameters, dim, max_position_embeddings=maximum, length=length)
        for length in (original, original + 1)
    ]


def _difference(got: Frequencies, want: Frequencies) -> npt.NDArray[np.float64]:
    """Return relative differences, absolute ones where 0 is expected (a proportional rope's tail); NaN is infinite."""
    scale = np.where(want == 0, 1.0, np.abs(want))
    difference: npt.NDArray[np.float64] = np.nan_to_num(np.abs(got - want) / scale, nan=np.inf)
    return difference


def _read(name: str, tensor: Any) -> Frequencies:
    if tensor.is_meta:
        raise RopeMismatchError(
            f"{name} is on the meta device and has no values yet. Verify after the weights are loaded; if they are, "
            "the loader left this buffer out, as no checkpoint holds it: call pose_plugin.rope.restore_rope(model)"
        )
    if str(tensor.dtype) not in ("torch.float32", "torch.float64"):
        raise RopeMismatchError(
            f"{name} is {tensor.dtype}, but must be torch.float32: a coarser type cannot tell position 256 from 257. "
            "Load with from_pretrained(…, dtype=torch.bfloat16), which keeps it, instead of .to(torch.bfloat16) or "
            ".half(); or call pose_plugin.rope.restore_rope(model) after the cast"
        )
    values: Frequencies = tensor.detach().cpu().double().numpy().reshape(-1)
    return values


def _frequencies_of_table(live: RotaryBuffer, wanted: _Expected) -> Frequencies:
    """Derive the frequencies from GPT-J's table of sin and cos, [positions, d]: the angles of position 1."""
    table = live.tensor
    if table.shape[0] < wanted.maximum:
        raise RopeMismatchError(f"{live.name} has {table.shape[0]} positions, but needs {wanted.maximum}. {_REBUILD}")
    half = table.shape[1] // 2
    row = _read(live.name, table[1])
    angles: Frequencies = np.arctan2(row[:half], row[half:])
    return angles
