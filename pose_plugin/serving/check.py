"""`pose-plugin check FOLDER`: is what reloads from here, without this package, the model that was trained?"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pose_plugin.errors import PoSEError
from pose_plugin.rope import legacy_copies
from pose_plugin.rope.kinds import normalise
from pose_plugin.serving.base import Base, base_of, is_adapter, read_json
from pose_plugin.serving.folder import RECORD, read_record, text_part
from pose_plugin.serving.probe import PROBE, read_probe

# How far logits may be apart, as a share of their own spread at a position, by the coarsest type on the way. Measured:
# float32 up to 7e-7 between attention functions; the quick start's trained model, loaded in a coarser type than it was
# trained in, 3e-3 in float16 and 3e-2 in bfloat16, where losing the extension makes 0.8. TF32 resolves as float16 does.
TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "tf32": 0.03, "float16": 0.03, "bfloat16": 0.1}
# The adapter was trained on a quantised base and now sits in a full-precision one.
_QUANTISED_AWAY = 0.5
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")

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


def check_folder(
    folder: str | Path,
    *,
    base: str | None = None,
    like: str | Path | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    trust_remote_code: bool = False,
    python: str | None = None,
    timeout: float = 3600,
) -> CheckReport:
    """Reloads a folder in a clean process and compares it with the trained model.

    The process cannot import this package. It loads the folder with plain transformers, an adapter with PEFT on its
    base built from the config beside the adapter, and answers with the tokenizer's maximum, the config's, the live
    frequencies, and logits at positions past the old window. They are held against `pose_probe.json`, which the
    trained model has answered.

    Args:
        folder: a model or an adapter that was saved by a run of this package.
        base: where the base is, if not where adapter_config.json says.
        like: the folder whose record and probe count, for a merged model that has none of its own.
        device: "cpu", "cuda", …
        dtype: load in this type instead of the trained one.
        trust_remote_code: let the folder's own code run.
        python: interpreter of another environment, e.g. one with transformers 4; this package need not be there.
        timeout: seconds for the reload.

    Raises:
        PoSEError: no such folder, or one that no run of this package has saved.
    """
    path, reference = Path(folder), Path(like or folder)
    record = _record(path, reference)
    report = CheckReport(str(folder))
    probe = read_probe(reference)
    adapter = is_adapter(path)
    if not _files_are_there(report, path, adapter):
        return report
    _forms_agree(report, path / "config.json")
    where = base_of(path, base) if adapter else None
    answer = _reload(path, where, record, probe, device, dtype, trust_remote_code, python or sys.executable, timeout)
    report.transformers = answer.get("transformers")
    report.add("reload", "error" not in answer, _reloaded(answer, path, where))
    _maximum(report, answer, int(record["target_length"]))
    _tokenizer(report, answer, int(record["target_length"]))
    if probe is None:
        report.add(
            "logits",
            False,
            f"no {PROBE} in {reference}: nothing says what the trained model answers. Save again with this version, "
            "or name the folder that has one with --like",
        )
    elif "logits" in answer:
        _frequencies(report, answer, probe)
        _logits(report, answer, probe, adapter, dtype)
    return report


def _record(path: Path, reference: Path) -> dict[str, Any]:
    for each in (path, reference):
        if not each.is_dir():
            raise PoSEError(f"{each} is no folder; name the output folder of a training run")
    if not (path / "config.json").is_file() and not is_adapter(path):
        raise PoSEError(f"{path} holds neither config.json nor adapter_config.json; name a saved model or adapter")
    record = read_record(reference)
    if "target_length" not in record:
        raise PoSEError(
            f"{reference} has no {RECORD}, so it is not known what was trained. The folder of a merged model is "
            "checked with --like ADAPTER, the folder that the adapter was saved in"
        )
    return record


def _files_are_there(report: CheckReport, path: Path, adapter: bool) -> bool:
    """What makes a reload pointless or misleading is told before it."""
    if not (path / "config.json").is_file():
        report.add(
            "config",
            False,
            "no config.json beside the adapter: its base would be loaded with the base's own frequencies. Run "
            "`pose-plugin check` with --repair, or copy the file from the output folder of the run",
        )
        return False
    stem = "adapter_model" if adapter else ""
    if not any(file.name.startswith(stem) for pattern in _WEIGHTS for file in path.glob(pattern)):
        report.add("weights", False, f"no {stem or 'model'} weights ({', '.join(_WEIGHTS)}) in the folder")
        return False
    return True


def _forms_agree(report: CheckReport, file: Path) -> None:
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


def _reload(
    path: Path,
    base: Base | None,
    record: Mapping[str, Any],
    probe: Mapping[str, Any] | None,
    device: str,
    dtype: str | None,
    trust_remote_code: bool,
    python: str,
    timeout: float,
) -> dict[str, Any]:
    adapter = base is not None
    built = (record.get("rope") or {}).get("type")
    request = {
        "folder": str(path.resolve()),
        "base": base.name if base else None,
        "revision": base.revision if base else None,
        "dtype": dtype or (probe["dtype"] if probe and adapter else "auto"),
        # A merged or full model says itself how it is stored.
        "quantization": probe["quantization"] if probe and adapter else None,
        "device": device,
        "trust_remote_code": trust_remote_code,
        # With rope: none there is nothing to lose.
        "theta": None if built == "none" else (record.get("model") or {}).get("original_theta"),
        "probe": {key: probe[key] for key in ("ids", "positions", "vocabulary")} if probe else None,
    }
    return _in_a_process_of_its_own(request, python, timeout)


def _in_a_process_of_its_own(request: Mapping[str, Any], python: str, timeout: float) -> dict[str, Any]:
    script = Path(__file__).with_name("_alone.py")
    with tempfile.TemporaryDirectory() as place:
        asked, answered = Path(place) / "request.json", Path(place) / "answer.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        # torch would load the package by its entry point.
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TOKENIZERS_PARALLELISM": "false"}
        try:
            done = subprocess.run(
                [python, str(script), str(asked), str(answered)],
                capture_output=True,
                text=True,
                timeout=timeout,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no answer within {timeout:g} s"}
        except OSError as error:
            raise PoSEError(f"--python {python} does not run: {error}; give the path of a Python interpreter") from None
        if not answered.is_file():
            return {"error": f"the process ended with code {done.returncode}: {done.stderr.strip()[-600:]}"}
        return json.loads(answered.read_text(encoding="utf-8"))


def _reloaded(answer: Mapping[str, Any], path: Path, base: Base | None) -> str:
    what = f"{path} on {base.name}" if base else str(path)
    if "error" in answer:
        hint = f". Is {base.name} the base it was trained on? --base names another" if base else ""
        return f"{what} does not load: {answer['error']}{hint}"
    return f"{what} loads with transformers {answer['transformers']}, without pose_plugin"


def _maximum(report: CheckReport, answer: Mapping[str, Any], target: int) -> None:
    if "maximum" not in answer:
        return
    found = answer["maximum"]
    good = isinstance(found, int) and found >= target
    report.add(
        "maximum",
        good,
        f"max_position_embeddings={found}" + ("" if good else f", but target_length={target} was trained"),
    )


def _tokenizer(report: CheckReport, answer: Mapping[str, Any], target: int) -> None:
    if "tokenizer_error" in answer:
        report.add("tokenizer", False, f"it does not load: {answer['tokenizer_error']}. Save it into the folder")
    elif "tokenizer" in answer:
        found = answer["tokenizer"]
        good = found >= target
        report.add(
            "tokenizer",
            good,
            f"model_max_length={found}"
            + ("" if good else f": texts of up to {target} tokens would be warned about or cut"),
        )


def _frequencies(report: CheckReport, answer: Mapping[str, Any], probe: Mapping[str, Any]) -> None:
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


def _logits(
    report: CheckReport, answer: Mapping[str, Any], probe: Mapping[str, Any], adapter: bool, dtype: str | None
) -> None:
    distance = logit_distance(answer["logits"], probe["logits"])
    report.numbers["logits"] = distance
    allowed, why = tolerance(probe, adapter, dtype)
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


def logit_distance(found: list[list[float]], wanted: list[list[float]]) -> float:
    """The largest, over the positions, of ‖found − wanted‖ / ‖wanted − its mean‖; not finite counts as infinite."""
    a, b = np.array(found, dtype=np.float64), np.array(wanted, dtype=np.float64)
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    spread = np.linalg.norm(b - b.mean(axis=1, keepdims=True), axis=1)
    return float((np.linalg.norm(a - b, axis=1) / np.where(spread == 0, 1.0, spread)).max())


def tolerance(probe: Mapping[str, Any], adapter: bool, dtype: str | None = None) -> tuple[float, str]:
    """What `logit_distance` may be, and why."""
    if probe["quantization"] and not adapter:
        return _QUANTISED_AWAY, "trained on a quantised base, merged into a full one"
    types = [probe["dtype"], probe["compute"], dtype or probe["dtype"]]
    coarsest = max(types, key=lambda name: TOLERANCE.get(name, 0.1))
    if probe["quantization"]:
        return max(TOLERANCE.get(coarsest, 0.1), TOLERANCE["bfloat16"]), "trained on a quantised base"
    return TOLERANCE.get(coarsest, 0.1), coarsest
