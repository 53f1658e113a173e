"""The kinds of `rope.type`, one row each in `KINDS`: how a base's rope is stretched to a longer window.

To add a kind, write a function from a `Stretch` to the rope keys it sets, and add its row to `KINDS`. Settings,
planning, verification and the model card read the row; nothing else names a kind. The frequencies of what is written
follow from its `rope_type`, see `CLOSED_FORMS` in kinds.py. Frequencies for which transformers has no `rope_type` are
written as a list of divisors, as `yarn-revised` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pose_plugin.rope import kinds, theory
from pose_plugin.rope.source import RopeSource
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.findings import Finding

# transformers accepts only `default` and `longrope` for these.
LONGROPE_ONLY = ("phi3", "phi4_multimodal", "phimoe")


@dataclass
class Stretch:
    """One request: stretch `source` by `factor` towards `target` tokens. Kinds append to notes and findings."""

    source: RopeSource
    values: Mapping[str, Any]  # all settings of the `rope:` block, defaults included
    given: frozenset[str]  # names of the settings that the user set
    target: int  # L_t
    factor: float  # s
    notes: list[str] = field(default_factory=list)  # how values were computed
    findings: list[Finding] = field(default_factory=list)

    def warn(self, key: str, value: Any, happens: str, fix: str) -> None:
        """Add a finding of a likely mistake."""
        self.findings.append(Finding(key, value, happens, fix))

    @property
    def theta(self) -> float:
        return self.source.original_theta

    @property
    def dim(self) -> int:
        return self.source.rotary_dim

    @property
    def pairs(self) -> int:
        """Return how many pairs turn: d/2, or fewer if the rope leaves the tail of a head at frequency 0."""
        current = self.source.current
        whole = current["rope_type"] != "proportional"
        return self.dim // 2 if whole else int(float(current.get("partial_rotary_factor", 1.0)) * self.dim // 2)

    @property
    def original(self) -> int:
        return self.source.original_length

    def shape(self, name: str, rope_type: str) -> float:
        """Return a setting as the user gave it, else as the base was trained with `rope_type`, else its default."""
        old = self.source.current
        if name not in self.given and old["rope_type"] == rope_type and old.get(name):
            return float(old[name])
        return float(self.values[name])


@dataclass(frozen=True)
class RopeKind:
    """One value of `rope.type`.

    Attributes:
        name: the value.
        title: what the model card calls it.
        write: returns the rope keys that it sets; `rope_theta` and `rope_type: default` are there if it sets none.
            Raises PoSEError for a base that it does not apply to.
        settings: optional settings of the `rope:` block that it reads, `original_length` aside.
        required: settings that it cannot do without, with their meaning.
        paper: arXiv number.
        stretches: False if the frequencies stay as they are.
        record: the name that is recorded in the config, if not its own.
    """

    name: str
    title: str
    write: Callable[[Stretch], dict[str, Any]]
    settings: tuple[str, ...] = ("factor",)
    required: Mapping[str, str] = field(default_factory=dict)
    paper: str | None = None
    stretches: bool = True
    record: str | None = None


def stretched(kind: RopeKind, request: Stretch) -> dict[str, Any]:
    """Return the complete flat rope dict of a kind. Keys of the base that do not describe a stretch are carried over.

    Raises:
        PoSEError: the base cannot express the kind, or its settings contradict each other.
    """
    if not kind.stretches:
        return kind.write(request)
    source, old = request.source, request.source.current
    reached = request.factor * request.original
    if "factor" in request.given and abs(reached - request.target) > 0.5:
        request.warn(
            "rope.factor",
            f"{request.factor:g}",
            f"it stretches {request.original} positions to {reached:g}, but target_length={request.target}",
            "Remove rope.factor, and it follows from the target",
        )
    carried = source.carried
    if "attention_factor" in request.given:
        carried = {key: value for key, value in carried.items() if key not in ("mscale", "mscale_all_dim")}
    result: dict[str, Any] = carried | {"rope_type": "default", "rope_theta": request.theta}
    result |= kind.write(request)
    if old["rope_type"] == "proportional":
        # Its closed form is that of `linear` with a tail of zeros, so it can express a factor and a base only.
        if result["rope_type"] not in ("default", "linear"):
            raise PoSEError(
                f"model type {source.model_type!r} leaves part of each head at frequency 0 (proportional rope), which "
                f"rope.type={kind.name} cannot express; use linear, ntk, base or auto"
            )
        result["rope_type"] = "proportional"
    # DeepSeek's attention reads it with the factor, for every rope type but `default`.
    if source.latent_attention and old.get("mscale_all_dim") and result["rope_type"] == "default":
        request.warn(
            "mscale_all_dim",
            f"{old['mscale_all_dim']:g}",
            f"the base scales its logits by its factor, and rope.type={kind.name} writes no factor, so it drops "
            "that scale",
            "Use rope: yarn, which keeps it",
        )
    return _only_longrope(request, result) if source.model_type in LONGROPE_ONLY else result


def _linear(request: Stretch) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": request.factor}


def _ntk(request: Stretch) -> dict[str, Any]:
    theta, factor, dim, pairs = request.theta, request.factor, request.dim, request.pairs
    base = kinds.ntk_base(theta, factor, dim, pairs)
    request.notes.append(f"NTK: base {theta:g} · {factor:g}^({dim}/{2 * (pairs - 1)}) = {base:g}")
    return {"rope_theta": base}


def _base(request: Stretch) -> dict[str, Any]:
    base, old = float(request.values["theta"]), request.theta
    if base <= old:
        request.warn(
            "rope.theta",
            f"{base:g}",
            f"it is not above the base's {old:g}, so the window becomes shorter, not longer",
            "Raise rope.theta; rope: auto logs bases that suffice",
        )
    elif not theory.can_retrieve(base, request.dim, request.target):
        request.warn(
            "rope.theta",
            f"{base:g}",
            f"it is below the retrieval bound for {request.target} tokens at d={request.dim} (arXiv 2405.14591): "
            "distant tokens may not be found by content",
            "Raise rope.theta; rope: auto logs bases that suffice",
        )
    return {"rope_theta": base}


def _auto(request: Stretch) -> dict[str, Any]:
    """Log four candidates and take the larger of (a) and (c)."""
    theta, factor, dim, target = request.theta, request.factor, request.dim, request.target
    retrieval, floor = theory.retrieval_base(target, dim), kinds.ntk_base(theta, factor, dim, request.pairs)
    chosen, name = max((retrieval, "a"), (floor, "c"))
    request.notes += [
        f"(a) retrieval lower bound for {target} tokens at d={dim} (arXiv 2405.14591): {retrieval:.3g}",
        f"(b) ProLong's 8e6 at 64k and 1.28e8 at 512k, as a power law: {theory.prolong_base(target):.3g}",
        f"(c) NTK floor {theta:g} · {factor:g}^({dim}/{2 * (request.pairs - 1)}): {floor:.3g}",
        f"(d) the Llama-3 8K→80K recipe (5e5 → 2e8), as a power law: {theory.llama3_80k_base(theta, factor):.3g}",
        f"auto takes ({name}), the larger of (a) and (c): below (a) content does not distinguish distant tokens, below "
        "(c) the slowest dimension passes angles it never saw. Longer trainings used (b) and (d)",
    ]
    return {"rope_theta": chosen}


def _yarn(request: Stretch) -> dict[str, Any]:
    source = request.source
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
    if request.values["attention_factor"] is None and (source.latent_attention or "mscale" in old):
        # A scale on cos and sin would miss the part of a latent head that is not rotated. DeepSeek's code scales the
        # softmax instead, by these two, and leaves their ratio to cos and sin.
        default = 1.0 if source.latent_attention else 0.0
        result["mscale"] = float(old.get("mscale") or default)
        result["mscale_all_dim"] = float(old.get("mscale_all_dim") or default)
    else:
        result["attention_factor"] = _attention(request, kinds.yarn_attention_factor(request.factor))
    return result


def _attention(request: Stretch, usual: float) -> float:
    """Return the scale of cos and sin: as the user set it, else by the base's own convention, else `usual`.

    The base's weights were trained with its scale, so a published formula or constant goes on.
    """
    asked, source = request.values["attention_factor"], request.source
    old = source.current
    if asked is not None or source.record or old["rope_type"] not in ("yarn", "longrope"):
        return float(asked or usual)
    before = float(old.get("factor") or source.max_position_embeddings / request.original)
    if abs(source.attention - kinds.yarn_attention_factor(before)) < 1e-4:
        return kinds.yarn_attention_factor(request.factor)
    if abs(source.attention - kinds.longrope_attention_factor(before, request.original)) < 1e-4:
        return kinds.longrope_attention_factor(request.target / request.original, request.original)
    return source.attention  # a constant: Ministral 3 has 1


def _yarn_revised(request: Stretch) -> dict[str, Any]:
    fast, slow = _betas(request)
    divisors = kinds.revised_yarn_factors(request.theta, request.dim, request.factor, request.original, fast, slow)
    request.notes.append(
        "yarn-revised is written as a longrope list; short and long list are equal, so all batches have one set of "
        "frequencies"
    )
    attention = _attention(request, kinds.yarn_attention_factor(request.factor))
    return as_list(request, attention, divisors.tolist())


def _llama3(request: Stretch) -> dict[str, Any]:
    low, high = (request.shape(name, "llama3") for name in ("low_freq_factor", "high_freq_factor"))
    if high <= low and {"low_freq_factor", "high_freq_factor"} & request.given:
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


def _longrope(request: Stretch) -> dict[str, Any]:
    long, short = _read_factors(request.values["factors_file"], request.dim)
    original = request.original
    attention = _attention(request, kinds.longrope_attention_factor(request.target / original, original))
    if long != short:
        request.warn(
            "rope.factors_file",
            request.values["factors_file"],
            f"its two lists differ: transformers takes long_factor for a whole batch if its largest position is "
            f"{original} or more, else short_factor. PoSE batches with all positions below {original} train the "
            "short list; engines with a fixed window use only the long one",
            "Make both lists equal for one set of frequencies",
        )
    return as_list(request, attention, long, short)


def _dynamic(request: Stretch) -> dict[str, Any]:
    raise PoSEError(
        "dynamic NTK is for inference only: its base follows the largest position of each batch, and PoSE draws new "
        "positions for each batch, so the frequencies would change all the time. Use rope: ntk for the same stretch at "
        "a fixed base, or rope: yarn"
    )


def _none(request: Stretch) -> dict[str, Any]:
    """Return the base's rope unchanged, with a factor that readers derive from the maximum written out."""
    current, known = request.source.current, request.source.window
    if current["rope_type"] == "dynamic" and not current.get("alpha"):
        _dynamic(request)
    original = current.get("original_max_position_embeddings")
    if current["rope_type"] in ("yarn", "longrope") and current.get("factor") is None and original:
        current["factor"] = request.source.max_position_embeddings / original
    if request.target > known:
        request.warn(
            "rope.type",
            "none",
            f"the frequencies stay: positions from {known} to {request.target - 1} turn the slow dimensions by "
            "angles the model has never seen, which only training can teach",
            "Use rope: yarn unless you want to study that",
        )
    return current


_YARN_SETTINGS = ("factor", "beta_fast", "beta_slow", "attention_factor")
KINDS: dict[str, RopeKind] = {
    kind.name: kind
    for kind in (
        RopeKind("linear", "linear position interpolation", _linear, paper="2306.15595"),
        RopeKind("ntk", "NTK-aware base", _ntk),
        RopeKind("base", "new base", _base, (), {"theta": "the new base, e.g. {type: base, theta: 2.0e8}"}),
        RopeKind("yarn", "YaRN", _yarn, _YARN_SETTINGS, paper="2309.00071"),
        RopeKind(
            "yarn-revised", "YaRN as in the PoSE authors' code", _yarn_revised, _YARN_SETTINGS, paper="2309.00071"
        ),
        RopeKind("llama3", "Llama 3 scaling", _llama3, ("factor", "low_freq_factor", "high_freq_factor")),
        RopeKind(
            "longrope",
            "LongRoPE",
            _longrope,
            ("factor", "attention_factor"),
            {"factors_file": "a JSON with long_factor and short_factor"},
            paper="2402.13753",
        ),
        RopeKind("dynamic", "dynamic NTK", _dynamic, ()),
        RopeKind("auto", "new base", _auto, (), record="base"),
        RopeKind("none", "unchanged", _none, (), stretches=False),
    )
}


def as_list(request: Stretch, attention: float, long: list[float], short: list[float] | None = None) -> dict[str, Any]:
    """Return the rope keys of frequencies that are given as divisors of the base's own.

    Args:
        attention: the scale of cos and sin.
        long: d/2 divisors for batches beyond the original window.
        short: for batches within it; default: the same.
    """
    return {
        "rope_type": "longrope",
        "factor": request.factor,
        "attention_factor": float(attention),
        "original_max_position_embeddings": request.original,
        "long_factor": list(long),
        "short_factor": list(long if short is None else short),
    }


def _betas(request: Stretch) -> tuple[float, float]:
    fast, slow = (request.shape(name, "yarn") for name in ("beta_fast", "beta_slow"))
    if fast <= slow and {"beta_fast", "beta_slow"} & request.given:
        raise PoSEError(f"rope.beta_fast={fast:g} must exceed rope.beta_slow={slow:g}; the paper uses 32 and 1")
    return fast, slow


def _only_longrope(request: Stretch, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the same frequencies in the one form that Phi-3's config class accepts."""
    source, kind = request.source, wanted["rope_type"]
    if kind not in ("default", "longrope"):
        frequencies, attention = kinds.inverse_frequencies(wanted, request.dim)
        divisors = (kinds.plain_frequencies(wanted["rope_theta"], request.dim) / frequencies).tolist()
        request.notes.append(
            f"model type {source.model_type!r} accepts no rope type but longrope, so {kind} is written as a longrope "
            "list with the same frequencies"
        )
        kept = {key: wanted[key] for key in ("rope_theta", "partial_rotary_factor") if key in wanted}
        wanted = kept | as_list(request, attention, divisors)
    if source.model_type == "phimoe" and wanted["rope_type"] == "longrope":
        if wanted["long_factor"] != wanted["short_factor"]:
            raise PoSEError(
                "model type 'phimoe' never switches to long_factor in transformers; make both lists of "
                "rope.factors_file equal, or use rope: yarn"
            )
        # Its modelling code reads these instead of attention_factor.
        wanted |= {"long_mscale": wanted["attention_factor"], "short_mscale": wanted["attention_factor"]}
    return wanted


def _read_factors(path: str, dim: int) -> tuple[list[float], list[float]]:
    """Return long_factor and short_factor of a JSON file.

    Raises:
        PoSEError: no such file, or not two lists of d/2 positive numbers.
    """
    where = f"rope.factors_file={path!r}"
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PoSEError(f"{where} cannot be read as JSON: {error}") from None
    lists = []
    for name in ("long_factor", "short_factor"):
        found = values.get(name) if isinstance(values, dict) else None
        if (
            not isinstance(found, list)
            or len(found) != dim // 2
            or not all(isinstance(x, (int, float)) and x > 0 for x in found)
        ):
            raise PoSEError(f"{where}: {name} must be a list of {dim // 2} numbers above 0 (d/2, d={dim})")
        lists.append([float(x) for x in found])
    return lists[0], lists[1]
