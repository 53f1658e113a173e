"""The closed form of every `rope_type`, in float64 and independent of any framework.

With d the rotary head dimension, i = 0 … d/2−1 and θ_i = base^(−2i/d), the angle of position p in dimension pair i is
p·θ_i. Context extension replaces θ_i by something slower: one function per `rope_type`, in `CLOSED_FORMS`.
`inverse_frequencies` picks it from a complete `rope_parameters` dict, and `verify_rope` compares live models with it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pose_plugin.utils.errors import PoSEError

Frequencies = npt.NDArray[np.float64]
Parameters = Mapping[str, Any]

YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
"""What YaRN computes with if a rope dict does not state them."""
ALIASES = {"su": "longrope"}
"""Old names, still found in checkpoints: the first release of Phi-3 called longrope so."""
# The keys of a rope dict that describe a stretch. A new stretch replaces them; every other key stays.
SHAPES = frozenset(
    {
        *("rope_type", "rope_theta", "factor", "alpha", "original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"),
        *("short_factor", "long_factor", "short_mscale", "long_mscale"),
    }
)


def plain_frequencies(base: float, dim: int) -> Frequencies:
    """Return θ_i = base^(−2i/d), shape [dim / 2], radians per token."""
    return np.power(float(base), -np.arange(0, dim, 2, dtype=np.float64) / dim)


def ntk_base(base: float, factor: float, dim: int, pairs: int | None = None) -> float:
    """Return base·s^(d/(2(n−1))), which stretches the slowest of n pairs by exactly s and the fastest by 1.

    Args:
        base: θ.
        factor: s.
        dim: d, the rotary dimension.
        pairs: n, the pairs that turn; default: all, d/2, so that the exponent is d/(d−2).
    """
    if dim <= 2:
        raise PoSEError(f"the NTK base needs a rotary dimension above 2, got {dim}; use rope.type: linear")
    return float(base * factor ** (dim / (2 * ((pairs or dim // 2) - 1))))


def dynamic_inner_term(factor: float, length: float, original_length: float) -> float:
    """Return s·L/L_0 − (s−1), which dynamic NTK raises to d/(d−2); 1 at L = L_0."""
    return factor * length / original_length - (factor - 1)


def yarn_ramp(
    base: float,
    dim: int,
    original_length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Frequencies:
    """Return r_i = clip((i − low) / (high − low), 0, 1), shape [dim / 2]: 0 keeps a pair, 1 divides it by s.

    A pair that turns r times within the original window has index d·ln(L_0 / (2πr)) / (2·ln base). Pairs below `low`
    turn more than `beta_fast` times and are kept; pairs above `high` turn less than `beta_slow` times and are divided
    by s; arXiv 2309.00071, section 3.2.
    """

    def pair_turning(rotations: float) -> float:
        return dim * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_turning(beta_fast), pair_turning(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # transformers does the same instead of dividing by zero
    ramp: Frequencies = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return ramp


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """Return 0.1·weight·ln s + 1, the scale of cos and sin (its square scales the logits); 1 for s ≤ 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def longrope_attention_factor(factor: float, original_length: int) -> float:
    """Return √(1 + ln s / ln L_0), arXiv 2402.13753; 1 for s ≤ 1."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_length))


def revised_yarn_factors(
    base: float,
    dim: int,
    factor: float,
    original_length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Frequencies:
    """Return the divisors of what the PoSE authors' code calls YaRN: m_i + s·(1 − m_i), m = 1 − ramp; shape [dim / 2].

    YaRN blends the frequencies, this blends the divisors: equal at both ends of the ramp, slower in between (16.5 times
    at s = 64).
    """
    kept = 1.0 - yarn_ramp(base, dim, original_length, beta_fast, beta_slow)
    return kept + factor * (1.0 - kept)


def normalise(parameters: Parameters) -> dict[str, Any]:
    """Return a copy of one flat rope dict with `rope_type` set and whole lengths as int.

    `{"type": "yarn"}`, the spelling of older checkpoints, becomes `{"rope_type": "yarn"}`.
    """
    result: dict[str, Any] = copy.deepcopy(dict(parameters))
    old = result.pop("type", None)
    kind = result.get("rope_type") or old or "default"
    result["rope_type"] = ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    length = result.get("original_max_position_embeddings")
    if isinstance(length, float) and length.is_integer():
        result["original_max_position_embeddings"] = int(length)
    return result


def inverse_frequencies(
    parameters: Parameters,
    dim: int,
    *,
    max_position_embeddings: int | None = None,
    length: int | None = None,
) -> tuple[Frequencies, float]:
    """Compute the frequencies and the attention factor of one complete rope dict.

    Args:
        parameters: `rope_type`, `rope_theta` and what the type needs (not nested by layer type).
        dim: d, the rotated dimensions of a head; a partial rotary factor is already in it, except for `proportional`,
            which takes the whole head and leaves its tail at frequency 0.
        max_position_embeddings: L_t, for types that derive `factor` from it.
        length: the largest position + 1 of a batch, for types that depend on it (`longrope` picks its list by it,
            `dynamic` its base). Default: `max_position_embeddings`; without either `longrope` takes the long list.

    Returns:
        inverse frequencies, shape [dim / 2], radians per token; the factor on cos and sin.

    Raises:
        PoSEError: an unknown type, a missing key, or lists of the wrong length.

    Example:
        >>> inverse_frequencies({"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}, dim=4)
        (array([0.125  , 0.00125]), 1.0)
    """
    values = normalise(parameters)
    kind = values["rope_type"]
    if kind not in CLOSED_FORMS:
        raise PoSEError(f"rope_type={kind!r} has no closed form here; known: {', '.join(sorted(CLOSED_FORMS))}")
    try:
        return CLOSED_FORMS[kind](values, dim, max_position_embeddings, length)
    except KeyError as missing:
        raise PoSEError(
            f"rope_type={kind} needs {missing.args[0]}, which is not in {sorted(values)}; add it to rope_parameters"
        ) from None


def _original(values: Parameters) -> int:
    return int(values["original_max_position_embeddings"])


def _stretch(values: Parameters, maximum: int | None) -> float:
    """Return `factor`, or maximum / original if it is missing, as in Phi-3 and DeepSeek checkpoints."""
    if values.get("factor") is not None:
        return float(values["factor"])
    if maximum is None:
        raise KeyError("factor")
    return maximum / _original(values)


def _default(values: Parameters, dim: int, maximum: int | None, length: int | None) -> tuple[Frequencies, float]:
    return plain_frequencies(values["rope_theta"], dim), 1.0


def _linear(values: Parameters, dim: int, maximum: int | None, length: int | None) -> tuple[Frequencies, float]:
    return plain_frequencies(values["rope_theta"], dim) / float(values["factor"]), 1.0


def _proportional(values: Parameters, dim: int, maximum: int | None, length: int | None) -> tuple[Frequencies, float]:
    turning = int(float(values.get("partial_rotary_factor", 1.0)) * dim // 2)
    frequencies = plain_frequencies(values["rope_theta"], dim) / float(values.get("factor") or 1.0)
    frequencies[turning:] = 0.0
    return frequencies, 1.0


def _dynamic(values: Parameters, dim: int, maximum: int | None, length: int | None) -> tuple[Frequencies, float]:
    if values.get("alpha"):
        # Hunyuan: in spite of the name, one fixed base at every length.
        return plain_frequencies(ntk_base(values["rope_theta"], float(values["alpha"]), dim), dim), 1.0
    if maximum is None:
        raise KeyError("max_position_embeddings")
    inner = dynamic_inner_term(float(values["factor"]), max(length or 0, maximum), maximum)
    return plain_frequencies(ntk_base(values["rope_theta"], inner, dim), dim), 1.0


def _yarn(values: Parameters, dim: int, maximum: int | None, length: int | None) -> tuple[Frequencies, float]:
    factor, original = _stretch(values, maximum), _original(values)
    base = float(values["rope_theta"])
    # `or`: transformers also reads an explicit null or 0 as the default.
    fast, slow = (float(values.get(key) or usual) for key, usual in YARN_BETAS.items())
    ramp = yarn_ramp(base, dim, original, fast, slow, bool(values.get("truncate", True)))
    plain = plain_frequencies(base, dim)
    attention = values.get("attention_factor")
    if attention is None:
        attention = yarn_attention_factor(factor)
        # DeepSeek puts the temperature into the softmax scale and leaves only the ratio to cos and sin.
        if values.get("mscale") and values.get("mscale_all_dim"):
            attention = yarn_attention_factor(factor, values["mscale"])
            attention /= yarn_attention_factor(factor, values["mscale_all_dim"])
    return plain * (1.0 - ramp) + plain / factor * ramp, float(attention)


def _longrope(values: Parameters, dim: int, maximum: int | None, length: int | None) -> tuple[Frequencies, float]:
    original = _original(values)
    reach = length if length is not None else maximum
    name = "long_factor" if reach is None or reach > original else "short_factor"
    divisors = np.asarray(values[name], dtype=np.float64)
    if divisors.shape != (dim // 2,):
        raise PoSEError(f"longrope: {name} has {divisors.size} entries, but {dim} rotated dimensions need {dim // 2}")
    attention = values.get("attention_factor")
    if attention is None:
        attention = longrope_attention_factor(_stretch(values, maximum), original)
    return plain_frequencies(values["rope_theta"], dim) / divisors, float(attention)


def _llama3(values: Parameters, dim: int, maximum: int | None, length: int | None) -> tuple[Frequencies, float]:
    factor, original = float(values["factor"]), _original(values)
    low, high = float(values["low_freq_factor"]), float(values["high_freq_factor"])
    plain = plain_frequencies(values["rope_theta"], dim)
    # L_0 / λ, the turns of a pair within the original window: above `high` kept, below `low` divided by s.
    turns = original * plain / (2 * math.pi)
    # Equal bounds, as some models publish them, leave no pair between them.
    weight = (turns >= low) * 1.0 if high == low else np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 - weight) * plain / factor + weight * plain, 1.0


CLOSED_FORMS: dict[str, Callable[[Parameters, int, int | None, int | None], tuple[Frequencies, float]]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
