"""One function per kind: from a model's present rope to the flat dict that stretches it.

Each appends to the request's notes (reasons) and warnings (likely mistakes) what the user should know.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pose_plugin.config import RopeSettings
from pose_plugin.rope import kinds, theory
from pose_plugin.rope.read import RopeSource
from pose_plugin.utils.errors import PoSEError

# transformers accepts only `default` and `longrope` for these; other kinds are written as a longrope list.
LONGROPE_ONLY = ("phi3", "phi4_multimodal", "phimoe")


@dataclass
class Stretch:
    """What is asked: s = `factor`, from `source.original_length` towards `target` tokens."""

    source: RopeSource
    settings: RopeSettings
    target: int
    factor: float
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def theta(self) -> float:
        return self.source.original_theta

    @property
    def dim(self) -> int:
        return self.source.rotary_dim

    @property
    def original(self) -> int:
        return self.source.original_length


def stretched(request: Stretch) -> dict[str, Any]:
    """The complete flat rope dict for `request.settings.type`; the base and partial factor are carried over.

    Raises:
        PoSEError: this model cannot express the kind, or the kind's settings contradict each other.
    """
    source, kind, old = request.source, request.settings.type, request.source.current
    if abs(request.factor * request.original - request.target) > 0.5:
        request.warnings.append(
            f"rope.factor={request.factor:g} stretches {request.original} to "
            f"{request.factor * request.original:g}, but target_length is {request.target}; remove "
            "rope.factor to get the matching one"
        )
    result: dict[str, Any] = {"rope_type": "default", "rope_theta": request.theta}
    if "partial_rotary_factor" in old:
        result["partial_rotary_factor"] = old["partial_rotary_factor"]
    result |= _KINDS[kind](request)
    if old["rope_type"] == "proportional":
        if kind not in ("linear", "ntk", "base", "auto"):
            raise PoSEError(
                f"model type {source.model_type!r} leaves part of each head at frequency 0 (proportional "
                f"rope); rope.type={kind} cannot be written for it. Use linear, ntk, base or auto"
            )
        result["rope_type"] = "proportional"
    if source.latent_attention and old.get("mscale_all_dim") and result["rope_type"] != "yarn":
        request.warnings.append(
            f"the model scales its logits by its yarn factor (mscale_all_dim={old['mscale_all_dim']:g}); "
            f"rope.type={kind} drops that scale. rope: yarn keeps it"
        )
    return _only_longrope(request, result) if source.model_type in LONGROPE_ONLY else result


def _linear(request: Stretch) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": request.factor}


def _ntk(request: Stretch) -> dict[str, Any]:
    theta, factor, dim = request.theta, request.factor, request.dim
    base = kinds.ntk_base(theta, factor, dim)
    request.notes.append(f"NTK: base {theta:g} · {factor:g}^({dim}/{dim - 2}) = {base:g}")
    return {"rope_theta": base}


def _base(request: Stretch) -> dict[str, Any]:
    base, old = float(request.settings.theta or 0), request.theta
    if base <= old:
        request.warnings.append(
            f"rope.theta={base:g} is not above the model's base {old:g}: its window gets shorter, not longer"
        )
    elif not theory.can_retrieve(base, request.dim, request.target):
        request.warnings.append(
            f"rope.theta={base:g} lies below the retrieval bound for {request.target} tokens at "
            f"d={request.dim} (arXiv 2405.14591): distant tokens may not be found by content. rope: auto "
            "prints bases that suffice"
        )
    return {"rope_theta": base}


def _auto(request: Stretch) -> dict[str, Any]:
    """The candidates side by side, and the larger of (a) and (c)."""
    theta, factor, dim, target = request.theta, request.factor, request.dim, request.target
    retrieval, floor = theory.retrieval_base(target, dim), kinds.ntk_base(theta, factor, dim)
    chosen, name = max((retrieval, "a"), (floor, "c"))
    recipe = theory.llama3_80k_base(theta, factor)
    request.notes += [
        f"(a) retrieval lower bound for {target} tokens at d={dim} (arXiv 2405.14591): {retrieval:.3g}",
        f"(b) ProLong's 8e6 at 64k and 1.28e8 at 512k, as a power law: {theory.prolong_base(target):.3g}",
        f"(c) NTK floor {theta:g} · {factor:g}^({dim}/{dim - 2}): {floor:.3g}",
        f"(d) the Llama-3 8K→80K recipe (5e5 → 2e8), as a power law in s: {recipe:.3g}",
        f"auto takes ({name}), the larger of (a) and (c): below (a) distant tokens cannot be told apart by "
        "content, below (c) the slowest dimension passes angles it never saw; (b) and (d) are what longer "
        "trainings used",
    ]
    return {"rope_theta": chosen}


def _llama3(request: Stretch) -> dict[str, Any]:
    low, high = (_kept(request, "llama3", name) for name in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise PoSEError(
            f"rope.high_freq_factor={high:g} must exceed rope.low_freq_factor={low:g}; Llama 3.1 uses 4 and 1"
        )
    return {
        "rope_type": "llama3",
        "factor": request.factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": request.original,
    }


def _yarn(request: Stretch) -> dict[str, Any]:
    source, settings = request.source, request.settings
    old = source.current if source.current["rope_type"] == "yarn" else {}
    fast, slow = _betas(request)
    result: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": request.factor,
        "original_max_position_embeddings": request.original,
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
        result["attention_factor"] = float(settings.attention_factor or kinds.yarn_attention_factor(request.factor))
    return result


def _yarn_revised(request: Stretch) -> dict[str, Any]:
    fast, slow = _betas(request)
    divisors = kinds.revised_yarn_factors(
        request.theta, request.dim, request.factor, request.original, fast, slow
    ).tolist()
    request.notes.append(
        "yarn-revised is written as a longrope list, short and long alike, so that every batch has the same frequencies"
    )
    attention = request.settings.attention_factor or kinds.yarn_attention_factor(request.factor)
    return _list(request, attention, divisors, divisors)


def _longrope(request: Stretch) -> dict[str, Any]:
    long, short = _read_factors(request.settings.factors_file, request.dim)
    attention = request.settings.attention_factor or kinds.longrope_attention_factor(request.factor, request.original)
    if long != short:
        request.warnings.append(
            "longrope with two lists: transformers takes long_factor for a whole batch when its largest "
            f"position is {request.original} or more, and short_factor otherwise. A PoSE batch whose "
            f"positions all fall below {request.original} therefore trains the short list, as a short "
            "prompt will use it; engines that serve with a fixed window use the long list throughout. Make "
            "both lists equal to have one set of frequencies"
        )
    return _list(request, attention, long, short)


_KINDS: dict[str, Callable[[Stretch], dict[str, Any]]] = {
    "linear": _linear,
    "ntk": _ntk,
    "base": _base,
    "auto": _auto,
    "llama3": _llama3,
    "yarn": _yarn,
    "yarn-revised": _yarn_revised,
    "longrope": _longrope,
}


def _betas(request: Stretch) -> tuple[float, float]:
    fast, slow = (_kept(request, "yarn", name) for name in ("beta_fast", "beta_slow"))
    if fast <= slow:
        raise PoSEError(f"rope.beta_fast={fast:g} must exceed rope.beta_slow={slow:g}; the paper uses 32 and 1")
    return fast, slow


def _kept(request: Stretch, kind: str, name: str) -> float:
    """What the user said, else what the model was trained with, else the paper's value."""
    old = request.source.current
    if name not in request.settings.model_fields_set and old["rope_type"] == kind and old.get(name):
        return float(old[name])
    return float(getattr(request.settings, name))


def _list(request: Stretch, attention: float, long: list[float], short: list[float]) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "factor": request.factor,
        "attention_factor": float(attention),
        "original_max_position_embeddings": request.original,
        "long_factor": list(long),
        "short_factor": list(short),
    }


def _only_longrope(request: Stretch, wanted: dict[str, Any]) -> dict[str, Any]:
    """The same frequencies in the one form that Phi-3's config class accepts."""
    source = request.source
    if wanted["rope_type"] in ("linear", "yarn", "llama3"):
        frequencies, attention = kinds.inverse_frequencies(wanted, request.dim)
        divisors = (kinds.plain_frequencies(wanted["rope_theta"], request.dim) / frequencies).tolist()
        request.notes.append(
            f"model type {source.model_type!r} accepts no rope type but longrope: {wanted['rope_type']} is "
            "written as a longrope list with the same frequencies"
        )
        kept = {key: wanted[key] for key in ("rope_theta", "partial_rotary_factor") if key in wanted}
        wanted = kept | _list(request, attention, divisors, divisors)
    if source.model_type == "phimoe" and wanted["rope_type"] == "longrope":
        if wanted["long_factor"] != wanted["short_factor"]:
            raise PoSEError(
                "model type 'phimoe' never switches to long_factor in transformers; make both lists of "
                "rope.factors_file equal, or use rope: yarn"
            )
        wanted |= {"long_mscale": wanted["attention_factor"], "short_mscale": wanted["attention_factor"]}
    return wanted


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
            raise PoSEError(
                f"{where}: {name} has {size}; this model needs a list of {dim // 2} numbers (d/2 with d={dim})"
            )
        if not all(isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0 for x in found):
            raise PoSEError(f"{where}: every entry of {name} must be a number above 0")
        lists.append([float(x) for x in found])
    return lists[0], lists[1]
