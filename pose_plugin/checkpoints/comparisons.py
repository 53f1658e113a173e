"""Compares a reloaded model with the trained one; each comparison adds its findings to the report."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pose_plugin.checkpoints.lengths import limits_below
from pose_plugin.checkpoints.merge import embeddings_came_apart
from pose_plugin.checkpoints.probe import PROBE
from pose_plugin.checkpoints.saved import RECORD, Base, Saved
from pose_plugin.rope import legacy_copies
from pose_plugin.rope.kinds import inverse_frequencies, normalise
from pose_plugin.rope.read import FULL
from pose_plugin.utils.errors import PoSEError, shown

# The largest allowed distance of logits, as a share of their spread at a position, by the coarsest type on the way.
# Measured: float32 up to 7e-7 between attention functions; the quick start's model in a type coarser than in
# training, 3e-3 in float16 and 3e-2 in bfloat16. Losing the extension makes 0.8. TF32 resolves as float16 does.
TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "tf32": 0.03, "float16": 0.03, "bfloat16": 0.1}
# For an adapter that was trained on a quantised base and is now merged into a full-precision one.
_QUANTISED_AWAY = 0.5

# "differs" fails the check; a "warning" or a "note" does not.
Verdict = Literal["ok", "differs", "warning", "note"]
# In README.md, as export/card.py writes it.
_CARD_WINDOW = re.compile(r"^# .*: a context window of (\d+) tokens$", re.M)


@dataclass
class CheckReport:
    """The findings of one check.

    Attributes:
        folder: what was reloaded.
        findings: (what, verdict, sentence).
        numbers: as far as they were measured, `logits` and, with the base's frequencies, `plain` (see
            `logit_distance`), `merge`, and `frequencies`, the largest relative difference.
        transformers: the version that reloaded it.
    """

    folder: str
    findings: list[tuple[str, Verdict, str]] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    transformers: str | None = None

    @property
    def passed(self) -> bool:
        return not self.differing()

    def add(self, what: str, good: bool | None, sentence: str) -> None:
        """Add a finding; `good=None` is a note."""
        verdict: Verdict = "note" if good is None else "ok" if good else "differs"
        self.findings.append((what, verdict, sentence))

    def warn(self, what: str, sentence: str) -> None:
        """Add a finding that does not fail the check."""
        self.findings.append((what, "warning", sentence))

    def differing(self) -> list[str]:
        """Return the names of what differs."""
        return self._with("differs")

    def _with(self, wanted: Verdict) -> list[str]:
        return list(dict.fromkeys(what for what, verdict, _ in self.findings if verdict == wanted))

    def __str__(self) -> str:
        lines = [f"{verdict:7}  {what:11}  {sentence}" for what, verdict, sentence in self.findings]
        wrong, warned = self.differing(), self._with("warning")
        end = f"differs in {', '.join(wrong)}" if wrong else "passed"
        end += f"; warnings: {', '.join(warned)}" if warned else ""
        return "\n".join([*lines, f"{self.folder}: {end}"])


def compare_forms(report: CheckReport, saved: Saved, ours: bool) -> None:
    """Compare the form of the rope that transformers 5 reads with that of older readers.

    Args:
        report: gets the finding.
        saved: what was saved.
        ours: whether a run of this package trained it, which saves both forms.
    """
    text = saved.text
    if saved.older:
        report.add("older form", None, "config.json has no rope_parameters, the form of transformers 5")
        return
    wanted = legacy_copies(saved.newer_parameters, saved.model_type)
    if wanted.get("rope_scaling") is not None and text.get("rope_scaling") is None:
        sentence = (
            "config.json has no rope_scaling: transformers 4, llama.cpp's converter and older vLLM would use the "
            "base's frequencies (checkpoints leave it out on purpose, as transformers 5 could not resume from them)"
        )
        if ours:
            report.add("older form", None if saved.path.name.startswith("checkpoint-") else False, sentence)
        else:
            report.warn("older form", sentence)
        return
    wrong = [key for key, value in wanted.items() if not _same(text.get(key), value, text)]
    if not ours:
        # transformers 5 saves no older keys, and a reader's default may be right.
        wrong = [key for key in wrong if text.get(key) is not None]
    value = shown(wanted[wrong[0]]) if wrong and wanted[wrong[0]] is not None else "no scaling"
    report.add(
        "older form",
        not wrong,
        f"{wrong[0]}={shown(text.get(wrong[0]))}, but rope_parameters has {value}"
        if wrong
        else "rope_parameters agrees with the keys that older readers know",
    )


def compare_targets(report: CheckReport, saved: Saved, reference: Saved) -> None:
    """Compare the one number that several files state: the window."""
    target, record = reference.target, reference.record
    origin = (saved.text.get("pose_plugin") or {}).get("target_length")
    # A margin is trained beyond the target, so the base may have been built for both.
    margin = record.target_margin if record is not None else 0
    if record is not None and origin is not None and not target <= origin <= target + margin:
        report.add(
            "target",
            False,
            f"{RECORD} has target_length={target}, but the model was built for {origin} tokens "
            "(config.json: pose_plugin.target_length). Train with one number",
        )
    reach = saved.factor * float(saved.rope.get("original_max_position_embeddings") or math.inf)
    # Of other kinds, the factor is no ratio of windows (Llama 3.1: 8 for 16 times), or it is not written (Phi-3).
    if saved.kind == "yarn" and reach < 0.999 * target:
        report.warn(
            "target",
            f"rope_parameters reach {reach:.0f} tokens (factor × original_max_position_embeddings), below {target}; "
            "some engines end there",
        )
    readme = saved.path / "README.md"
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    for number in _CARD_WINDOW.findall(text):
        if int(number) != target:
            report.add("target", False, f"README.md states {number} tokens, not {target}; run pose-plugin card")
    for limit in limits_below(saved, target):
        # The two others are compared as a reload reads them.
        if limit.key not in ("max_position_embeddings", "model_max_length"):
            report.add("lengths", False, f"{limit.file}: {limit.key}={limit.value} is below {target}: {limit.effect}")


def _same(found: Any, wanted: Any, text: Mapping[str, Any]) -> bool:
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        # The older form keeps these next to its dict, and readers look for them there.
        beside = {key: text[key] for key in ("rope_theta", "partial_rotary_factor") if text.get(key) is not None}
        return beside | normalise(found) == beside | normalise(wanted)
    return bool(found == wanted)


def compare_maximum(report: CheckReport, answer: Mapping[str, Any], target: int) -> None:
    if "maximum" in answer:
        found = answer["maximum"]
        good = isinstance(found, int) and found >= target
        wrong = "" if good else f", but target_length={target}"
        report.add("maximum", good, f"max_position_embeddings={found}{wrong}")


def compare_tokenizer(report: CheckReport, answer: Mapping[str, Any], target: int) -> None:
    if "tokenizer_error" in answer:
        fix = "Save it into the folder"
        if "TokenizersBackend" in answer["tokenizer_error"]:
            fix = "transformers 4 cannot read what transformers 5 saves; `pose-plugin export … --form 4` writes a copy"
        report.add("tokenizer", False, f"it does not load: {answer['tokenizer_error'].rstrip('.')}. {fix}")
    elif "tokenizer" in answer:
        found = answer["tokenizer"]
        wrong = "" if found >= target else f": texts of up to {target} tokens would raise a warning or be truncated"
        report.add("tokenizer", found >= target, f"model_max_length={found}{wrong}")


def compare_generation(report: CheckReport, answer: Mapping[str, Any], base: Base | None) -> None:
    """Report whether `generate` takes a prompt beyond the old window."""
    if "generates" not in answer or answer["generates"] is None:
        if "generates" in answer:
            report.add("generate", True, "generate() takes a prompt that leaves one token of the window")
    elif base is not None:
        report.warn(
            "generate",
            f"on {base.name}, generate() refuses a long prompt: {shown(Exception(answer['generates']))}. Load "
            "both with pose_plugin.load_extended, or pass max_new_tokens",
        )
    else:
        report.add("generate", False, f"generate() refuses long prompts: {shown(Exception(answer['generates']))}")


def look_without_probe(report: CheckReport, answer: Mapping[str, Any], saved: Saved, reference: Saved) -> CheckReport:
    """Compare the live frequencies with the config's, and state that the weights are unproved. Return the report."""
    finite = bool(np.isfinite(np.array(answer["logits"], dtype=np.float64)).all())
    unknown = f"no {PROBE} in {reference.path}, so it is not proved that these weights are the trained ones"
    if not finite:
        report.add("logits", False, "not finite at positions within the window")
    elif reference.record is not None:
        report.add("logits", False, f"{unknown}. Save again, or name a folder that has one with --like")
    else:
        report.add("logits", None, unknown)
    wanted = {}
    for name, buffer in answer["frequencies"].items():
        layer = next((key for key in saved.rope_parameters if key in name and key != FULL), FULL)
        rope = saved.rope_parameters.get(layer, saved.rope_parameters)
        try:
            frequencies, scale = inverse_frequencies(
                {"rope_theta": saved.rope["rope_theta"], **rope},
                2 * len(buffer["inv_freq"]),
                max_position_embeddings=saved.maximum,
            )
        except (PoSEError, ValueError, TypeError) as error:
            report.add("frequencies", None, f"{name} cannot be computed from the config: {shown(error)}")
            return report
        wanted[name] = {"inv_freq": frequencies.tolist(), "scale": scale}
    compare_frequencies(report, answer["frequencies"], wanted, allowed=1e-4)
    return report


def compare_frequencies(
    report: CheckReport, found: Mapping[str, Any], wanted: Mapping[str, Any], allowed: float = 1e-5
) -> None:
    if not wanted:
        report.add("frequencies", None, "the model has no buffer of frequencies; only the logits depend on them")
        return
    worst, count = 0.0, 0
    for name, want in wanted.items():
        got = found.get(name)
        if got is None or len(got["inv_freq"]) != len(want["inv_freq"]):
            report.add("frequencies", False, f"{name} is missing or has another size")
            return
        a, b = np.array(got["inv_freq"]), np.array(want["inv_freq"])
        apart = np.nan_to_num(np.abs(a - b) / np.where(b == 0, 1.0, np.abs(b)), nan=np.inf)
        if apart.max() > allowed:
            first = int(np.argmax(apart > allowed))
            report.add("frequencies", False, f"{name}[{first}] is {a[first]:.6g}, not {b[first]:.6g}")
            return
        if not math.isclose(got["scale"], want["scale"], rel_tol=allowed):
            report.add("frequencies", False, f"{name}: cos and sin × {got['scale']:g}, not {want['scale']:g}")
            return
        worst, count = max(worst, float(apart.max())), count + b.size
    report.numbers["frequencies"] = worst
    report.add("frequencies", True, f"{count} live frequencies, largest relative difference {worst:.0e}")


def compare_logits(
    report: CheckReport, answer: Mapping[str, Any], probe: Mapping[str, Any], saved: Saved, reference: Saved
) -> None:
    distance = report.numbers["logits"] = logit_distance(answer["logits"], probe["logits"])
    allowed, why = tolerance(probe, saved.adapter is not None, answer["dtype"])
    good = distance <= allowed
    sentence = (
        f"{len(probe['positions'])} positions up to {probe['positions'][-1]}: distance {distance:.1e} of their spread "
        f"(allowed {allowed:g}, {why})"
    )
    plain = logit_distance(answer["plain"], probe["logits"]) if answer.get("plain") else None
    if plain is not None:
        report.numbers["plain"] = plain
        sentence += f"; at the base's frequencies it would be {plain:.1e}"
    report.add("logits", good, sentence)
    if not good and (cause := embeddings_came_apart(saved, reference)):
        report.add("embeddings", False, cause)
    if plain is not None and good and plain <= allowed:
        report.add("logits", None, "this comparison is too coarse to tell the two apart; rely on the frequencies above")


def compare_merge(
    report: CheckReport, answer: Mapping[str, Any], whole: Mapping[str, Any], adapter: str | Path
) -> None:
    """Compare a merged adapter that was trained on a quantised base with itself on the unquantised base."""
    if "logits" not in whole:
        report.add("merge", None, f"{adapter} does not load on the unquantised base: {whole.get('error')}")
        return
    distance = report.numbers["merge"] = logit_distance(answer["logits"], whole["logits"])
    coarsest = _coarsest([answer["dtype"], whole["dtype"]])
    good = distance <= TOLERANCE[coarsest]
    sentence = f"distance {distance:.1e} from {adapter} on the unquantised base"
    if not good:
        sentence += (
            f" (more than {coarsest} explains): so does a merge that imitates the quantisation, as Axolotl's "
            "memory_efficient"
        )
    report.add("merge", True if good else None, sentence)


def logit_distance(found: list[list[float]], wanted: list[list[float]]) -> float:
    """Return the largest ‖found − wanted‖ / ‖wanted − its mean‖ over the positions; not finite counts as infinite."""
    a, b = np.array(found, dtype=np.float64), np.array(wanted, dtype=np.float64)
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    spread = np.linalg.norm(b - b.mean(axis=1, keepdims=True), axis=1)
    return float((np.linalg.norm(a - b, axis=1) / np.where(spread == 0, 1.0, spread)).max())


def tolerance(probe: Mapping[str, Any], adapter: bool, dtype: str) -> tuple[float, str]:
    """Return the largest allowed `logit_distance`, and the reason.

    Args:
        probe: of the trained model.
        adapter: whether an adapter was reloaded, and not a full or merged model.
        dtype: of the weights as they were reloaded.
    """
    if probe["quantization"] and not adapter:
        return _QUANTISED_AWAY, "trained on a quantised base, merged into a full one"
    coarsest = _coarsest([probe["dtype"], probe["compute"], dtype])
    if probe["quantization"]:
        return max(TOLERANCE[coarsest], TOLERANCE["bfloat16"]), "trained on a quantised base"
    return TOLERANCE[coarsest], coarsest


def _coarsest(types: list[str]) -> str:
    # An unknown type, of some quantisation, counts as the coarsest known one.
    return max((name if name in TOLERANCE else "bfloat16" for name in types), key=lambda name: TOLERANCE[name])
