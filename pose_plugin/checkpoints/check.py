"""`pose-plugin check FOLDER`: does a reload without this package give the model that was trained?"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pose_plugin.checkpoints.comparisons import (
    CheckReport,
    compare_forms,
    compare_frequencies,
    compare_generation,
    compare_logits,
    compare_maximum,
    compare_merge,
    compare_targets,
    compare_tokenizer,
    look_without_probe,
)
from pose_plugin.checkpoints.probe import probe_inputs, read_probe
from pose_plugin.checkpoints.saved import RECORD, Base, Saved, base_of, is_adapter, read_saved
from pose_plugin.utils.errors import PoSEError, shown
from pose_plugin.utils.files import read_json, write_json
from pose_plugin.utils.tables import counted

_DTYPES = ("float32", "bfloat16", "float16")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


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
    """Reload a folder in a clean process and compare it with the trained model.

    The process cannot import this package. It loads the folder with plain transformers, an adapter with PEFT on a base
    built from the adapter's config. A folder without record and probe is compared with its own config only.

    Args:
        folder: a model or an adapter.
        base: where the base is, if not where adapter_config.json says.
        like: take record and probe from this folder, for a merged model that has none.
        device: "cpu", "cuda", …
        dtype: "float32", "bfloat16" or "float16", instead of the trained type.
        trust_remote_code: allow the folder's own code to run.
        python: interpreter of another environment, e.g. with transformers 4; it does not need this package.
        timeout: seconds for the reload.

    Raises:
        PoSEError: no such folder, or a file in it that cannot be read.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise PoSEError(f"--dtype {dtype} is unknown; use {', '.join(_DTYPES)}, or leave it out for the trained type")
    saved, reference = read_saved(folder), Saved(Path(folder if like is None else like))
    if like is not None and reference.record is None:
        raise PoSEError(f"--like {like} has no {RECORD}; name the folder that the adapter was saved in")
    report, probe = CheckReport(str(folder)), read_probe(reference.path)
    _add_warnings(report, saved, reference)
    if not _files_are_there(report, saved):
        return report
    compare_forms(report, saved, ours=reference.record is not None)
    compare_targets(report, saved, reference)
    load = _Reload(saved, reference, probe, device, dtype, trust_remote_code, python or sys.executable, timeout)
    where = None if saved.adapter is None else base_of(saved.path, base)
    answer = load(saved.path, where)
    _add_reload(report, answer, saved.path, where)
    compare_maximum(report, answer, reference.target)
    compare_tokenizer(report, answer, reference.target)
    if "maximum" not in report.differing():
        compare_generation(report, answer, where)
    if "logits" not in answer:
        return report
    if probe is None:
        return look_without_probe(report, answer, saved, reference)
    compare_frequencies(report, answer["frequencies"], probe["frequencies"])
    compare_logits(report, answer, probe, saved, reference)
    source = reference.path if reference.adapter is not None else saved.path.parent
    if probe["quantization"] and saved.adapter is None and is_adapter(source):
        # The adapter was trained on rounded weights and merged into full ones: compare with it on full ones.
        compare_merge(report, answer, load(source, base_of(source, base), quantized=False), source)
    return report


def _add_reload(report: CheckReport, answer: Mapping[str, Any], path: Path, base: Base | None) -> None:
    report.transformers = answer.get("transformers")
    report.add("reload", "error" not in answer, _reloaded(answer, path, base))
    if missing := answer.get("missing"):
        names = f"{counted(len(missing), 'weight')} missing from the files, the first {shown(missing[0])}"
        report.add("weights", False, f"{names}: random numbers took their place. Save or copy the folder again")
    if "logits" not in answer and "error" not in answer:
        report.add("logits", None, "not computed, as config.json names no vocab_size")


def _add_warnings(report: CheckReport, saved: Saved, reference: Saved) -> None:
    for sentence in reference.warnings:
        report.warn("record" if reference.record is None else "training", sentence)
    parent = Saved(saved.path.resolve().parent)
    if reference.record is None and saved.adapter is None and parent.adapter is not None and parent.record is not None:
        report.warn("record", f"if this is the adapter in {parent.path} merged, add --like {parent.path}")


def _files_are_there(report: CheckReport, saved: Saved) -> bool:
    """Report missing files that would make a reload pointless or misleading."""
    if saved.config is None:
        report.add(
            "config",
            False,
            "no config.json next to the adapter: its base would be loaded with the base's own frequencies. Copy the "
            "file from the output folder of the run",
        )
        return False
    stem = "adapter_model" if saved.adapter is not None else ""
    if not any(file.name.startswith(stem) for pattern in _WEIGHTS for file in saved.path.glob(pattern)):
        report.add("weights", False, f"no {stem or 'model'} weights ({', '.join(_WEIGHTS)}) in the folder")
        return False
    return True


# -- the reload ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reload:
    saved: Saved
    reference: Saved
    probe: Mapping[str, Any] | None
    device: str
    dtype: str | None
    trust_remote_code: bool
    python: str
    timeout: float

    def __call__(self, path: Path, base: Base | None, quantized: bool = True) -> dict[str, Any]:
        """Return the answers of a model, or of an adapter on a base that is loaded as in training."""
        probe, record = self.probe, self.reference.record
        trained_as = probe if base is not None and probe is not None else {}
        built = record.rope.type if record is not None and record.rope is not None else None
        request = {
            "folder": str(path.resolve()),
            "base": base.name if base else None,
            "revision": base.revision if base else None,
            # The config of a full or merged model says how it is stored.
            "dtype": self.dtype or trained_as.get("dtype", "auto"),
            "quantization": trained_as.get("quantization") if quantized else None,
            "device": self.device,
            "trust_remote_code": self.trust_remote_code,
            # With rope: none there is no extension that could be lost.
            "theta": None if built == "none" or record is None else record.model.original_theta,
            "probe": {key: probe[key] for key in ("ids", "positions", "vocabulary")} if probe else self._inputs(),
            "prompt": max(1, self.reference.target - 1),
        }
        return _run_worker(request, self.python, self.timeout)

    def _inputs(self) -> dict[str, list[int]] | None:
        """Return what to ask a model whose trained answers are unknown; None if its vocabulary is unknown too."""
        vocabulary, target = self.saved.text.get("vocab_size"), self.reference.target
        return probe_inputs(vocabulary, self.reference.original or target, target) if vocabulary else None


def _run_worker(request: Mapping[str, Any], python: str, timeout: float) -> dict[str, Any]:
    script = Path(__file__).with_name("reload_worker.py")
    with tempfile.TemporaryDirectory() as place:
        asked, answered = Path(place) / "request.json", Path(place) / "answer.json"
        write_json(asked, request)
        # Without this, torch would load the package by its entry point.
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TOKENIZERS_PARALLELISM": "false"}
        command = [python, str(script), str(asked), str(answered)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
        except subprocess.TimeoutExpired:
            return {"error": f"no answer within {timeout:g} s"}
        except OSError as error:
            raise PoSEError(f"--python {python} cannot be run: {error}; give the path of an interpreter") from None
        if not answered.is_file():
            return {"error": f"the process ended with code {done.returncode}: {done.stderr.strip()[-600:]}"}
        return read_json(answered)


def _reloaded(answer: Mapping[str, Any], path: Path, base: Base | None) -> str:
    what = f"{path} on {base.name}" if base else str(path)
    if "error" in answer:
        hint = f". Is {base.name} the base it was trained on? --base names another" if base else ""
        return f"{what} does not load: {shown(Exception(answer['error']), 400)}{hint}"
    return f"{what} loads with transformers {answer['transformers']}, without pose_plugin"
