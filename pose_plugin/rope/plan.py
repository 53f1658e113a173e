"""From a model's config and one number, `target_length`, to the complete rope parameters.

`plan_rope` decides and explains; it writes nothing. `apply_plan` in apply.py writes.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pose_plugin.config import RopeSettings, parse_settings
from pose_plugin.errors import PoSEError
from pose_plugin.rope import kinds, theory
from pose_plugin.rope.read import RopeSource, read_rope

# Which settings mean something for which type. A setting without effect is refused, not ignored.
_APPLIES = {
    "factor": ("linear", "ntk", "yarn", "yarn-revised", "llama3", "longrope"),
    "beta_fast": ("yarn", "yarn-revised"),
    "beta_slow": ("yarn", "yarn-revised"),
    "attention_factor": ("yarn", "yarn-revised", "longrope"),
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
}
# transformers accepts only `default` and `longrope` for these; other kinds are written as a longrope list.
_LONGROPE_ONLY = ("phi3", "phi4_multimodal", "phimoe")


@dataclass(frozen=True)
class RopePlan:
    """What will be written, and why. Lengths in tokens; s = target_length / original_length."""

    type: str  # as asked for, `auto` resolved
    model_type: str
    rope_parameters: dict[str, Any]  # complete; nested by layer type where the model's are
    layer_type: str | None  # the key that changed; None where the dict is flat
    rotary_dim: int
    max_position_embeddings: int
    target_length: int
    original_length: int
    original_theta: float
    factor: float
    top_original: bool
    fixed: bool
    before: str
    after: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def current(self) -> dict[str, Any]:
        """The flat dict of the layers that were changed."""
        inner = self.rope_parameters[self.layer_type] if self.layer_type else self.rope_parameters
        return copy.deepcopy(inner)

    @property
    def record(self) -> dict[str, Any]:
        """What the config remembers, so that a later extension starts from the true original."""
        return {
            "rope": self.type,
            "target_length": self.target_length,
            "original_length": self.original_length,
            "original_theta": self.original_theta,
        }


def rope_settings(rope: str | dict[str, Any] | RopeSettings, target_length: int) -> RopeSettings:
    """The validated settings, with `target_length` checked as well.

    Raises:
        PoSEError: naming the key, its value and the way out.
    """
    if isinstance(rope, RopeSettings):
        rope = rope.model_dump(exclude_unset=True)
    settings = parse_settings({"target_length": target_length, "rope": rope}).rope
    for key, types in _APPLIES.items():
        if key in settings.model_fields_set and getattr(settings, key) is not None and settings.type not in types:
            raise PoSEError(
                f"rope.{key}={getattr(settings, key)} has no effect with rope.type={settings.type}; it belongs to "
                f"{', '.join(types)}. Remove it or change the type"
            )
    return settings


def plan_rope(config: Any, target_length: int, rope: str | dict[str, Any] | RopeSettings = "yarn") -> RopePlan:
    """Decides how a model's frequencies are stretched to a longer window.

    Args:
        config: a transformers config or the dict of its config.json; not modified.
        target_length: L_t, the wanted window in tokens.
        rope: a type's name, the settings as a dict (`{"type": "base", "theta": 2e8}`) or RopeSettings.

    Raises:
        PoSEError: the model has no RoPE, the settings contradict each other, or the target is not
            beyond the original window.
    """
    settings = rope_settings(rope, target_length)
    source = read_rope(config, settings.original_length)
    notes, warnings = list(source.notes), _window_warnings(source, target_length)
    _refuse(source, settings, target_length)

    if settings.type == "none":
        kind, current, factor = "none", _pinned(source), 1.0
        maximum = max(source.max_position_embeddings, target_length)
        if target_length > source.max_position_embeddings:
            warnings.append(
                f"rope.type=none keeps the frequencies: positions from {source.max_position_embeddings} to "
                f"{target_length - 1} turn the slow dimensions by angles the model has never seen, and training alone "
                "has to teach them. Use rope: yarn unless that is what you want to study"
            )
    else:
        kind, maximum = settings.type, target_length
        factor = settings.factor or target_length / source.original_length
        current, reasons, cautions = _stretched(source, settings, target_length, factor)
        notes += reasons
        warnings += cautions
        notes += _replaced(source, target_length)
    if kind == "auto":
        kind = "base"
    parameters = copy.deepcopy(source.parameters)
    if source.layer_type:
        parameters[source.layer_type] = current
        others = sorted(key for key in parameters if key != source.layer_type)
        notes.append(f"only the {source.layer_type} layers change; {', '.join(others)} keep their own rope")
    else:
        parameters = current
    return RopePlan(
        type=kind,
        model_type=source.model_type,
        rope_parameters=parameters,
        layer_type=source.layer_type,
        rotary_dim=source.rotary_dim,
        max_position_embeddings=maximum,
        target_length=target_length,
        original_length=source.original_length,
        original_theta=source.original_theta,
        factor=float(factor),
        top_original=source.top_original or current["rope_type"] == "longrope",
        fixed=source.fixed,
        before=describe(source.current, source.max_position_embeddings),
        after=describe(current, maximum),
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def describe(parameters: dict[str, Any], maximum: int) -> str:
    """One line: type, base, factor, original length, window."""
    parts = [str(parameters["rope_type"]), f"theta {parameters['rope_theta']:g}"]
    if parameters.get("factor"):
        parts.append(f"factor {parameters['factor']:g}")
    if parameters.get("original_max_position_embeddings"):
        parts.append(f"from {parameters['original_max_position_embeddings']}")
    return f"{', '.join(parts)}; window {maximum}"


def _refuse(source: RopeSource, settings: RopeSettings, target: int) -> None:
    if settings.type == "dynamic" or (settings.type == "none" and source.current["rope_type"] == "dynamic"):
        raise PoSEError(
            "dynamic NTK is for inference only: its base follows the largest position of each batch, and PoSE draws "
            "those anew for every batch, so the model would never see the same frequencies twice. "
            "Use rope: ntk for the same stretch at a fixed base, or rope: yarn"
        )
    if settings.type == "none":
        return
    if source.fixed:
        raise PoSEError(
            f"model type {source.model_type!r} computes its rotary table with base 10000 and reads no rope parameters, "
            f"so rope.type={settings.type} would change nothing. Use rope: none, or another model"
        )
    if target <= source.original_length:
        raise PoSEError(
            f"target_length={target} does not exceed the model's original window of {source.original_length}, so "
            f"there is nothing for rope.type={settings.type} to stretch. Raise target_length, or keep the frequencies "
            "with rope: none; if the original window is wrong, set rope.original_length"
        )


def _stretched(
    source: RopeSource, settings: RopeSettings, target: int, factor: float
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The new flat dict, reasons and warnings."""
    kind, dim, theta, original = settings.type, source.rotary_dim, source.original_theta, source.original_length
    notes: list[str] = []
    warnings: list[str] = []
    if abs(factor * original - target) > 0.5:
        warnings.append(
            f"rope.factor={factor:g} stretches {original} to {factor * original:g}, but target_length is {target}; "
            "remove rope.factor to get the matching one"
        )
    result: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    old = source.current
    if "partial_rotary_factor" in old:
        result["partial_rotary_factor"] = old["partial_rotary_factor"]
    if old["rope_type"] == "proportional":
        result["rope_type"] = "proportional"
        if kind not in ("linear", "ntk", "base", "auto"):
            raise PoSEError(
                f"model type {source.model_type!r} leaves part of each head at frequency 0 (proportional rope); "
                f"rope.type={kind} cannot be written for it. Use linear, ntk, base or auto"
            )
    if kind == "linear":
        result |= {"rope_type": old["rope_type"] if old["rope_type"] == "proportional" else "linear", "factor": factor}
    elif kind == "ntk":
        result["rope_theta"] = kinds.ntk_base(theta, factor, dim)
        notes.append(f"NTK: base {theta:g} · {factor:g}^({dim}/{dim - 2}) = {result['rope_theta']:g}")
    elif kind == "base":
        assert settings.theta is not None
        result["rope_theta"] = float(settings.theta)
        warnings += _base_warnings(theta, settings.theta, dim, target)
    elif kind == "auto":
        result["rope_theta"], reasons = _advise(theta, factor, dim, target)
        notes += reasons
    elif kind == "llama3":
        result |= _llama3(settings, old, factor, original)
    elif kind == "yarn":
        result |= _yarn(source, settings, factor)
    elif kind == "yarn-revised":
        attention = settings.attention_factor or kinds.yarn_attention_factor(factor)
        divisors = kinds.revised_yarn_factors(theta, dim, factor, original, settings.beta_fast, settings.beta_slow)
        result |= _longrope_list(divisors.tolist(), factor, attention, original)
        notes.append(
            "yarn-revised is written as a longrope list, short and long alike, so that every batch has the same "
            "frequencies"
        )
    elif kind == "longrope":
        long, short = _read_factors(settings.factors_file, dim)
        attention = settings.attention_factor or kinds.longrope_attention_factor(factor, original)
        result |= _longrope_list(long, factor, attention, original, short)
        if long != short:
            warnings.append(
                f"longrope with two lists: transformers takes long_factor for a whole batch when its largest position "
                f"is {original} or more, and short_factor otherwise. A PoSE batch whose positions all fall below "
                f"{original} therefore trains the short list, as a short prompt will use it; engines that serve with "
                "a fixed window use the long list throughout. Make both lists equal to have one set of frequencies"
            )
    if source.latent_attention and old.get("mscale_all_dim") and result["rope_type"] != "yarn":
        warnings.append(
            f"the model scales its logits by its yarn factor (mscale_all_dim={old['mscale_all_dim']:g}); "
            f"rope.type={kind} drops that scale. rope: yarn keeps it"
        )
    if source.model_type in _LONGROPE_ONLY:
        result, why = _only_longrope(source, result, factor)
        notes += why
    return result, notes, warnings


def _llama3(settings: RopeSettings, old: dict[str, Any], factor: float, original: int) -> dict[str, Any]:
    low, high = (
        _kept(settings, old, "llama3", name) for name in ("low_freq_factor", "high_freq_factor")
    )
    if high <= low:
        raise PoSEError(
            f"rope.high_freq_factor={high:g} must exceed rope.low_freq_factor={low:g}; Llama 3.1 uses 4 and 1"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _yarn(source: RopeSource, settings: RopeSettings, factor: float) -> dict[str, Any]:
    old = source.current if source.current["rope_type"] == "yarn" else {}
    fast, slow = (_kept(settings, old, "yarn", name) for name in ("beta_fast", "beta_slow"))
    if fast <= slow:
        raise PoSEError(f"rope.beta_fast={fast:g} must exceed rope.beta_slow={slow:g}; the paper uses 32 and 1")
    result: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": source.original_length,
        "beta_fast": fast,
        "beta_slow": slow,
    }
    if "truncate" in old:
        result["truncate"] = old["truncate"]
    if settings.attention_factor is None and source.latent_attention:
        # Part of a latent head is not rotated, so a scale on cos and sin would miss it. DeepSeek's code
        # scales the softmax instead, from these two, and leaves their ratio to cos and sin.
        result["mscale"] = float(old.get("mscale") or 1.0)
        result["mscale_all_dim"] = float(old.get("mscale_all_dim") or 1.0)
    else:
        result["attention_factor"] = float(settings.attention_factor or kinds.yarn_attention_factor(factor))
    return result


def _kept(settings: RopeSettings, old: dict[str, Any], kind: str, name: str) -> float:
    """What the user said, else what the model was trained with, else the paper's value."""
    if name not in settings.model_fields_set and old.get("rope_type") == kind and old.get(name):
        return float(old[name])
    return float(getattr(settings, name))


def _longrope_list(
    long: list[float], factor: float, attention: float, original: int, short: list[float] | None = None
) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "factor": factor,
        "attention_factor": float(attention),
        "original_max_position_embeddings": original,
        "long_factor": list(long),
        "short_factor": list(long if short is None else short),
    }


def _only_longrope(
    source: RopeSource, wanted: dict[str, Any], factor: float
) -> tuple[dict[str, Any], list[str]]:
    """The same frequencies in the one form that Phi-3's config class accepts."""
    notes = []
    if wanted["rope_type"] in ("linear", "yarn", "llama3"):
        frequencies, attention = kinds.inverse_frequencies(wanted, source.rotary_dim)
        divisors = kinds.plain_frequencies(wanted["rope_theta"], source.rotary_dim) / frequencies
        kept = {key: wanted[key] for key in ("rope_theta", "partial_rotary_factor") if key in wanted}
        notes.append(
            f"model type {source.model_type!r} accepts no rope type but longrope: {wanted['rope_type']} is written as "
            "a longrope list with the same frequencies"
        )
        wanted = kept | _longrope_list(divisors.tolist(), factor, attention, source.original_length)
    if source.model_type == "phimoe" and wanted["rope_type"] == "longrope":
        if wanted["long_factor"] != wanted["short_factor"]:
            raise PoSEError(
                "model type 'phimoe' never switches to long_factor in transformers; make both lists of "
                "rope.factors_file equal, or use rope: yarn"
            )
        wanted |= {"long_mscale": wanted["attention_factor"], "short_mscale": wanted["attention_factor"]}
    return wanted, notes


def _read_factors(path: str | None, dim: int) -> tuple[list[float], list[float]]:
    where = f"rope.factors_file={path!r}"
    try:
        values = json.loads(Path(str(path)).read_text(encoding="utf-8"))
    except OSError as error:
        raise PoSEError(f"{where} cannot be read: {error.strerror}; give the path of a JSON file") from None
    except ValueError as error:
        raise PoSEError(f"{where} is not JSON: {error}") from None
    lists = []
    for name in ("long_factor", "short_factor"):
        found = values.get(name) if isinstance(values, dict) else None
        if not isinstance(found, list) or len(found) != dim // 2:
            size = f"{len(found)} entries" if isinstance(found, list) else f"{found!r}"
            raise PoSEError(f"{where}: {name} has {size}; this model needs a list of {dim // 2} numbers (d/2, d={dim})")
        if not all(isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0 for x in found):
            raise PoSEError(f"{where}: every entry of {name} must be a number above 0")
        lists.append([float(x) for x in found])
    return lists[0], lists[1]


def _advise(theta: float, factor: float, dim: int, target: int) -> tuple[float, list[str]]:
    """`auto`: the candidates side by side, and the larger of (a) and (c)."""
    retrieval, floor = theory.retrieval_base(target, dim), kinds.ntk_base(theta, factor, dim)
    chosen, name = max((retrieval, "a"), (floor, "c"))
    return chosen, [
        f"(a) retrieval lower bound for {target} tokens at d={dim} (arXiv 2405.14591): {retrieval:.3g}",
        f"(b) ProLong's 8e6 at 64k and 1.28e8 at 512k, as a power law: {theory.prolong_base(target):.3g}",
        f"(c) NTK floor {theta:g} · {factor:g}^({dim}/{dim - 2}): {floor:.3g}",
        f"(d) the Llama-3 8K→80K recipe (5e5 → 2e8), as a power law in s: {theory.llama3_80k_base(theta, factor):.3g}",
        f"auto takes ({name}), the larger of (a) and (c): below (a) distant tokens cannot be told apart by content, "
        f"below (c) the slowest dimension passes angles it never saw; (b) and (d) were tuned for longer training",
    ]


def _base_warnings(old: float, new: float, dim: int, target: int) -> list[str]:
    if new <= old:
        return [f"rope.theta={new:g} is not above the model's base {old:g}: its window gets shorter, not longer"]
    if not theory.can_retrieve(new, dim, target):
        return [
            f"rope.theta={new:g} lies below the retrieval bound for {target} tokens at d={dim} (arXiv 2405.14591): "
            "distant tokens may not be found by content. rope: auto prints bases that suffice"
        ]
    return []


def _pinned(source: RopeSource) -> dict[str, Any]:
    """The unchanged dict; a factor that readers derive from the maximum is written down before that rises."""
    current = source.current
    original = current.get("original_max_position_embeddings")
    if current["rope_type"] in ("yarn", "longrope") and current.get("factor") is None and original:
        current["factor"] = source.max_position_embeddings / original
    return current


def _replaced(source: RopeSource, target: int) -> list[str]:
    old, maximum = source.current, source.max_position_embeddings
    notes = []
    if old["rope_type"] not in ("default", "proportional"):
        notes.append(
            f"replaces the model's own scaling ({describe(old, maximum)}); computed from its original window of "
            f"{source.original_length}, so nothing is scaled twice"
        )
    elif source.record and source.original_length != maximum:
        notes.append(
            f"the model was extended before ({source.record.get('rope')}, from {source.original_length} to {maximum}); "
            f"computed from its original window and base {source.original_theta:g}, so nothing is scaled twice"
        )
    if target < maximum:
        notes.append(
            f"the model's window was {maximum} and becomes target_length={target}; rope: none would keep its own "
            "frequencies and window"
        )
    return notes


def _window_warnings(source: RopeSource, target: int) -> list[str]:
    layers, total = source.sliding_layers
    window = source.sliding_window
    if not window or not layers or window >= target:
        return []
    if layers == total:
        return [
            f"every layer of this model sees only a sliding window of {window} tokens, so no token attends further "
            f"back than that, whatever the frequencies; target_length={target} will not be reached"
        ]
    return [
        f"{layers} of {total} layers see only a sliding window of {window} tokens; the reach to {target} rests on the "
        f"other {total - layers}"
    ]
