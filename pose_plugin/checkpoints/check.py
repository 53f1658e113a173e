"""`pose-plugin check FOLDER`: is what reloads from here, without this package, the model that was trained?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pose_plugin.checkpoints import compare
from pose_plugin.checkpoints.adapter import Base, base_of, is_adapter
from pose_plugin.checkpoints.compare import CheckReport
from pose_plugin.checkpoints.folder import RECORD, read_record
from pose_plugin.checkpoints.probe import read_probe
from pose_plugin.utils.errors import PoSEError

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
        dtype: "float32", "bfloat16" or "float16", instead of the trained type.
        trust_remote_code: let the folder's own code run.
        python: interpreter of another environment, e.g. one with transformers 4; this package need not be there.
        timeout: seconds for the reload.

    Raises:
        PoSEError: no such folder, or one that no run of this package has saved.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise PoSEError(f"--dtype {dtype} is unknown; use {', '.join(_DTYPES)}, or leave it out for the trained type")
    path, reference = Path(folder), Path(like or folder)
    record = _record(path, reference)
    report = CheckReport(str(folder))
    probe = read_probe(reference)
    adapter = is_adapter(path)
    if not _files_are_there(report, path, adapter):
        return report
    compare.forms_agree(report, path / "config.json")
    load = _Reload(record, probe, device, dtype, trust_remote_code, python or sys.executable, timeout)
    where = base_of(path, base) if adapter else None
    answer = load(path, where)
    report.transformers = answer.get("transformers")
    report.add("reload", "error" not in answer, _reloaded(answer, path, where))
    compare.maximum(report, answer, int(record["target_length"]))
    compare.tokenizer(report, answer, int(record["target_length"]))
    if probe is None:
        compare.no_probe(report, reference)
    elif "logits" in answer:
        compare.frequencies(report, answer, probe)
        compare.logits(report, answer, probe, adapter)
        source = reference if is_adapter(reference) else path.parent
        if probe["quantization"] and not adapter and is_adapter(source):
            # What was trained was the adapter on rounded weights; what was merged is the adapter on the whole ones.
            whole = load(source, base_of(source, base), quantized=False)
            compare.merged_weights(report, answer, whole, source)
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


@dataclass(frozen=True)
class _Reload:
    record: Mapping[str, Any]
    probe: Mapping[str, Any] | None
    device: str
    dtype: str | None
    trust_remote_code: bool
    python: str
    timeout: float

    def __call__(self, path: Path, base: Base | None, quantized: bool = True) -> dict[str, Any]:
        """The answers of a model, or of an adapter on a base; of the latter loaded as in training."""
        probe = self.probe
        trained_as = probe if base is not None and probe is not None else {}
        built = (self.record.get("rope") or {}).get("type")
        request = {
            "folder": str(path.resolve()),
            "base": base.name if base else None,
            "revision": base.revision if base else None,
            # A full or merged model says itself how it is stored.
            "dtype": self.dtype or trained_as.get("dtype", "auto"),
            "quantization": trained_as.get("quantization") if quantized else None,
            "device": self.device,
            "trust_remote_code": self.trust_remote_code,
            # With rope: none there is nothing to lose.
            "theta": None if built == "none" else (self.record.get("model") or {}).get("original_theta"),
            "probe": {key: probe[key] for key in ("ids", "positions", "vocabulary")} if probe else None,
        }
        return _run_worker(request, self.python, self.timeout)


def _run_worker(request: Mapping[str, Any], python: str, timeout: float) -> dict[str, Any]:
    script = Path(__file__).with_name("reload_worker.py")
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
