"""The comparisons of `pose-plugin check`: each adds one finding to the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pose_plugin.checkpoints.folder import text_part
from pose_plugin.checkpoints.probe import PROBE
from pose_plugin.rope import legacy_copies
from pose_plugin.rope.kinds import normalise
from pose_plugin.utils.files import read_json

# How far logits may be apart, as a share of their own spread at a position, by the coarsest type on the way. Measured:
# float32 up to 7e-7 between attention functions; the quick start's trained model, loaded in a coarser type than it was
# trained in, 3e-3 in float16 and 3e-2 in bfloat16, where losing the extension makes 0.8. TF32 resolves as float16 does.
TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "tf32": 0.03, "float16": 0.03, "bfloat16": 0.1}
# The adapter was trained on a quantised base and now sits in a full-precision one.
_QUANTISED_AWAY = 0.5

Verdict = Literal["ok", "differs", "note"]


@dataclass
class CheckReport:
    """What was compared.

    Attributes:
        folder: what was reloaded.
        findings: (what, verdict, sentence).
        numbers: `logits` and, with the base's frequencies in place of the extension's, `plain`, see `logit_distance`;
            `frequencies`, the largest relative difference. As far as they were measured.
        transformers: version that reloaded it.
    """

    folder: str
    findings: list[tuple[str, Verdict, str]] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    transformers: str | None = None

    @property
    def passed(self) -> bool:
        return all(verdict != "differs" for _, verdict, _ in self.findings)

    def add(self, what: str, good: bool | None, sentence: str) -> None:
        """`good=None` is a note."""
        verdict: Verdict = "note" if good is None else "ok" if good else "differs"
        self.findings.append((what, verdict, sentence))

    def differing(self) -> list[str]:
        """What differs, by name."""
        return [what for what, verdict, _ in self.findings if verdict == "differs"]

    def __str__(self) -> str:
        lines = [f"{verdict:7}  {what:11}  {sentence}" for what, verdict, sentence in self.findings]
        wrong = self.differing()
        end = f"{self.folder}: differs in {', '.join(wrong)}" if wrong else f"{self.folder}: passed"
        return "\n".join([*lines, end])


def forms_agree(report: CheckReport, file: Path) -> None:
    """transformers 5 and older readers look at different keys."""
    text = text_part(read_json(file))
    if text is None or not text.get("rope_parameters"):
        report.add("older form", None, "config.json has no rope_parameters, the form of transformers 5")
        return
    wanted = legacy_copies(text["rope_parameters"], str(text.get("model_type")))
    scaling = text.get("rope_scaling")
    if "rope_scaling" in wanted and scaling is None and wanted["rope_scaling"] is not None:
        report.add(
            "older form",
            None if file.parent.name.startswith("checkpoint-") else False,
            "config.json has no rope_scaling: transformers 4, llama.cpp's converter and older vLLM would run it at the "
            "frequencies of the base (a checkpoint is written so on purpose, as it could not be resumed otherwise)",
        )
        return
    wrong = [key for key, value in wanted.items() if not _same(text.get(key), value)]
    told = f"{wrong[0]}={text.get(wrong[0])!r} but rope_parameters says {wanted[wrong[0]]!r}" if wrong else ""
    report.add("older form", not wrong, told or "rope_parameters and the keys that older readers know say the same")


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        return normalise(found) == normalise(wanted)
    return found == wanted


def maximum(report: CheckReport, answer: Mapping[str, Any], target: int) -> None:
    if "maximum" not in answer:
        return
    found = answer["maximum"]
    good = isinstance(found, int) and found >= target
    report.add(
        "maximum",
        good,
        f"max_position_embeddings={found}" + ("" if good else f", but target_length={target} was trained"),
    )


def tokenizer(report: CheckReport, answer: Mapping[str, Any], target: int) -> None:
    if "tokenizer_error" in answer:
        mend = "Save it into the folder"
        if "TokenizersBackend" in answer["tokenizer_error"]:
            mend = (
                "transformers 4 does not know what transformers 5 saves; `pose-plugin export … --form 4` writes a copy"
            )
        report.add("tokenizer", False, f"it does not load: {answer['tokenizer_error'].rstrip('.')}. {mend}")
    elif "tokenizer" in answer:
        found = answer["tokenizer"]
        good = found >= target
        report.add(
            "tokenizer",
            good,
            f"model_max_length={found}"
            + ("" if good else f": texts of up to {target} tokens would be warned about or cut"),
        )


def frequencies(report: CheckReport, answer: Mapping[str, Any], probe: Mapping[str, Any]) -> None:
    wanted, found = probe["frequencies"], answer["frequencies"]
    if not wanted:
        report.add("frequencies", None, "the model keeps no buffer of frequencies; the logits speak for them")
        return
    worst, count = 0.0, 0
    for name, want in wanted.items():
        got = found.get(name)
        if got is None or len(got["inv_freq"]) != len(want["inv_freq"]):
            report.add("frequencies", False, f"{name} is gone or has another size")
            return
        a, b = np.array(got["inv_freq"]), np.array(want["inv_freq"])
        apart = np.abs(a - b) / np.where(b == 0, 1.0, np.abs(b))
        apart = np.nan_to_num(apart, nan=np.inf)
        first = int(np.argmax(apart > 1e-5))
        if apart.max() > 1e-5:
            report.add(
                "frequencies", False, f"{name}[{first}] is {a[first]:.6g}, trained was {b[first]:.6g} (config.json?)"
            )
            return
        if not math.isclose(got["scale"], want["scale"], rel_tol=1e-6):
            report.add("frequencies", False, f"{name}: cos and sin × {got['scale']:g}, trained was {want['scale']:g}")
            return
        worst, count = max(worst, float(apart.max())), count + b.size
    report.numbers["frequencies"] = worst
    report.add("frequencies", True, f"{count} live frequencies, largest relative difference {worst:.0e}")


def logits(report: CheckReport, answer: Mapping[str, Any], probe: Mapping[str, Any], adapter: bool) -> None:
    distance = logit_distance(answer["logits"], probe["logits"])
    report.numbers["logits"] = distance
    allowed, why = tolerance(probe, adapter, answer["dtype"])
    good = distance <= allowed
    sentence = (
        f"{len(probe['positions'])} positions up to {probe['positions'][-1]}: {distance:.1e} of their spread apart "
        f"(allowed {allowed:g}, {why})"
    )
    plain = logit_distance(answer["plain"], probe["logits"]) if answer.get("plain") else None
    if plain is not None:
        report.numbers["plain"] = plain
        sentence += f"; at the base's frequencies it would be {plain:.1e}"
    report.add("logits", good, sentence)
    if plain is not None and good and plain <= allowed:
        report.add("logits", None, "this comparison is too coarse to tell the two apart; the frequencies above do")


def no_probe(report: CheckReport, folder: Path) -> None:
    report.add(
        "logits",
        False,
        f"no {PROBE} in {folder}: nothing says what the trained model answers. Save again with this version, or name "
        "the folder that has one with --like",
    )


def merged_weights(
    report: CheckReport, answer: Mapping[str, Any], whole: Mapping[str, Any], adapter: str | Path
) -> None:
    """An adapter that was trained on a quantised base, merged: held against itself on the unquantised base."""
    if "logits" not in whole:
        report.add("merge", None, f"{adapter} does not load on the unquantised base: {whole.get('error')}")
        return
    distance = logit_distance(answer["logits"], whole["logits"])
    report.numbers["merge"] = distance
    coarsest = _coarsest([answer["dtype"], whole["dtype"]])
    good = distance <= TOLERANCE[coarsest]
    sentence = f"{distance:.1e} apart from {adapter} on the unquantised base"
    if not good:
        sentence += (
            f" (more than {coarsest} explains): a merge that imitates the quantisation, as Axolotl's memory_efficient "
            "does, differs by it"
        )
    report.add("merge", True if good else None, sentence)


def logit_distance(found: list[list[float]], wanted: list[list[float]]) -> float:
    """The largest, over the positions, of ‖found − wanted‖ / ‖wanted − its mean‖; not finite counts as infinite."""
    a, b = np.array(found, dtype=np.float64), np.array(wanted, dtype=np.float64)
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    spread = np.linalg.norm(b - b.mean(axis=1, keepdims=True), axis=1)
    return float((np.linalg.norm(a - b, axis=1) / np.where(spread == 0, 1.0, spread)).max())


def tolerance(probe: Mapping[str, Any], adapter: bool, dtype: str) -> tuple[float, str]:
    """What `logit_distance` may be, and why.

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
    # A type that is not known, of some quantisation, counts as the coarsest known one.
    return max((name if name in TOLERANCE else "bfloat16" for name in types), key=lambda name: TOLERANCE[name])
