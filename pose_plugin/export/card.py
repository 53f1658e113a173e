"""The model card: a section of README.md between two marks.

Axolotl, TRL, transformers and PEFT also write README.md: at the end of training, at checkpoints and at uploads. So the
section is inserted after each of them, in front of their text, and replaces only itself.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pose_plugin.checkpoints.folder import RECORD
from pose_plugin.checkpoints.saved import Saved, read_saved
from pose_plugin.export import exporter
from pose_plugin.positions import SAMPLERS
from pose_plugin.rope.stretch import KINDS
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.files import write_whole

BEGIN, END = "<!-- pose-plugin: begin -->", "<!-- pose-plugin: end -->"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CITATION = """\
```bibtex
@inproceedings{zhu2024pose,
  title     = {PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise Training},
  author    = {Zhu, Dawei and Yang, Nan and Wang, Liang and Song, Yifan and Wu, Wenhao and Wei, Furu and Li, Sujian},
  booktitle = {International Conference on Learning Representations},
  year      = {2024},
  url       = {https://arxiv.org/abs/2309.10400}
}
```"""


def write_card(
    folder: str | Path, evaluation: str | Path | None = None, tokenizer_maximum: int | None = None
) -> Path | None:
    """Write or renew the section in a folder's README.md.

    Args:
        folder: saved by a run of this package; without a record nothing is written.
        evaluation: output folder of `pose-plugin evaluate`; copied into the folder if it is elsewhere. Default: the
            newest one inside the folder.
        tokenizer_maximum: see `read_saved`.

    Returns: the file, or None.

    Raises:
        PoSEError: an evaluation without report.md; a README.md that cannot be read, which stays unchanged.
    """
    from huggingface_hub import ModelCard, ModelCardData
    from yaml import YAMLError

    path = Path(folder)
    if not (path / RECORD).is_file() or not (path / "config.json").is_file():
        return None
    saved = read_saved(path, tokenizer_maximum)
    found = _bring(path, Path(evaluation)) if evaluation is not None else _newest_evaluation(path)
    file = path / "README.md"
    try:
        # utf-8-sig: a byte order mark would hide the metadata.
        old = file.read_text(encoding="utf-8-sig") if file.exists() else ""
        card = ModelCard(old if old.startswith("---") else f"---\n{{}}\n---\n{old}", ignore_metadata_errors=True)
    except (OSError, ValueError, YAMLError) as error:
        raise PoSEError(
            f"{file} was not changed, as its text (UTF-8) or its metadata (YAML between two ---) cannot be read: "
            f"{error}. Correct it, or move it away"
        ) from None
    data = ModelCardData(**_metadata(saved, card.data.to_dict()), ignore_metadata_errors=True)
    body = re.sub(re.escape(BEGIN) + r".*?" + re.escape(END) + r"\n*", "", card.text, flags=re.S).strip()
    text = f"{BEGIN}\n{_section(saved, found)}\n{END}\n" + (f"\n{body}\n" if body else "")
    write_whole(file, f"---\n{data.to_yaml()}\n---\n\n{text}")
    return file


def _metadata(saved: Saved, old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata: what others wrote, without what the hub would reject, and what this package knows."""
    values = {key: value for key, value in old.items() if value not in (None, [], "")}
    values.setdefault("library_name", "transformers" if saved.base is None else "peft")
    values.setdefault("pipeline_tag", "text-generation")
    base = values.get("base_model") or (saved.record.get("base") or {}).get("name")
    names = [name for name in ([base] if isinstance(base, str) else base or []) if _on_the_hub(name)]
    # The hub rejects cards whose base is not a repository's name, e.g. a local folder.
    values.pop("base_model", None)
    if names:
        values["base_model"] = names[0] if len(names) == 1 else names
    known = old.get("datasets") or saved.record.get("data") or []
    sets = [name for name in ([known] if isinstance(known, str) else known) if _on_the_hub(name)]
    values.pop("datasets", None)
    if sets:
        values["datasets"] = sets
    rope = (saved.record.get("rope") or {}).get("type")
    ours = ["long-context", "context-window-extension", "pose", *([str(rope)] if rope not in (None, "none") else [])]
    tags = old.get("tags") or []
    tags = [tags] if isinstance(tags, str) else tags
    # PEFT also writes a tag for a base in a local folder.
    kept = [tag for tag in tags if not tag.startswith("base_model:") or _on_the_hub(tag.rsplit(":", 1)[-1])]
    values["tags"] = list(dict.fromkeys([*kept, *ours]))
    return values


def _on_the_hub(name: Any) -> bool:
    """Return whether a name can be a repository's: not a path, not a file."""
    text = str(name)
    return bool(_REPOSITORY.fullmatch(text)) and not Path(text).exists() and not text.endswith((".jsonl", ".json"))


def _section(saved: Saved, evaluation: Path | None) -> str:
    record = saved.record
    model = record.get("model") or {}
    before, target = model.get("original_length"), record["target_length"]
    window = f"{before} → {target}" if before else str(target)
    parts = [
        f"# {saved.path.resolve().name}: a context window of {target} tokens",
        _facts(saved, window),
        "## Evaluation",
        _evaluation(saved, evaluation),
        "## Serving",
        _serving(saved),
        "## Limits",
        _limits(saved),
        "## Citation",
        _CITATION,
    ]
    return "\n\n".join(parts)


def _facts(saved: Saved, window: str) -> str:
    record = saved.record
    model, trained = record.get("model") or {}, record.get("trained") or {}
    kind = str((record.get("rope") or {}).get("type"))
    known = KINDS.get(kind)
    name, paper = (known.title, known.paper) if known else (kind, None)
    rope = name + (f" ([arXiv {paper}](https://arxiv.org/abs/{paper}))" if paper else "")
    rope += f", factor {saved.factor:g}" if saved.factor != 1 else ""
    base = record.get("base") or {}
    rows = {
        "window, tokens": window + _times(model.get("original_length"), record["target_length"]),
        "method": _method(record),
        "RoPE": rope,
        "theta before → after": f"{model.get('original_theta') or '?'} → {saved.rope['rope_theta']}",
        "base": f"{base.get('name') or 'unknown'}" + (f" at {base['revision']}" if base.get("revision") else ""),
        "data": ", ".join(record.get("data") or []) or "not recorded",
        "trained": _trained(trained),
        "hardware": record.get("hardware") or "not recorded",
        "software": ", ".join(f"{key} {value}" for key, value in (record.get("versions") or {}).items()),
    }
    return "| | |\n| --- | --- |\n" + "\n".join(f"| {key} | {_cell(value)} |" for key, value in rows.items() if value)


def _method(record: Mapping[str, Any]) -> str:
    adapter = record.get("adapter") or {}
    how = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA"}.get(
        str(record.get("method")), str(record.get("method") or "")
    )
    if adapter.get("r"):
        how += f" of rank {adapter['r']}"
    if adapter.get("modules_to_save"):
        how += f" and whole {', '.join(adapter['modules_to_save'])}"
    if record.get("merged"):
        how += ", merged"
    window = record.get("train_length")
    rows = f", windows of {window} tokens" if window else ""
    # None for a folder saved by a version that knows other samplers.
    sampler = SAMPLERS.get(str(record.get("sampler")))
    if sampler is not None and not sampler.skips:
        return f"plain positions{rows}; {how}"
    chunks = f", {record.get('chunks')} chunks" if sampler is not None and "chunks" in sampler.options() else ""
    paper = "[PoSE](https://arxiv.org/abs/2309.10400)"
    return f"{paper} (sampler {record.get('sampler')}{chunks}){rows}; {how}"


def _trained(trained: Mapping[str, Any]) -> str:
    if not trained:
        return "not recorded"
    drawn = trained.get("first_process") or {}
    text = f"{trained['steps']} steps of {trained['rows_a_step']} rows, {trained['epochs']:g} epochs"
    if drawn.get("tokens"):
        share = "" if trained.get("processes", 1) == 1 else f" in the first of {trained['processes']} processes"
        text += f"; {drawn['tokens']} tokens drawn{share} (some fetched ahead), farthest position {drawn['farthest']}"
    return text


def _times(before: int | None, after: int) -> str:
    return f" ({after / before:g}×)" if before else ""


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _evaluation(saved: Saved, evaluation: Path | None) -> str:
    if evaluation is None:
        before = (saved.record.get("model") or {}).get("original_length")
        lengths = ",".join(str(length) for length in (before, saved.record["target_length"]) if length)
        name = saved.path.resolve().name
        return (
            "Not evaluated. To put tables and pictures here:\n\n```bash\n"
            f"pose-plugin evaluate {name} --lengths {lengths} --output {name}/evaluation\npose-plugin card {name}\n```"
        )
    text = (evaluation / "report.md").read_text(encoding="utf-8").strip()
    pictures = [f"![{file.stem}]({evaluation.name}/{file.name})" for file in sorted(evaluation.glob("*.png"))]
    return "\n\n".join([text, *pictures])


def _serving(saved: Saved) -> str:
    # The name instead of the path: readers of the card have the folder elsewhere.
    named = replace(saved, path=Path(saved.path.resolve().name))
    parts = []
    for engine, language in (("transformers", "python"), ("vllm", "bash"), ("llama.cpp", "bash")):
        try:
            made = exporter(engine)(named)
        except PoSEError as error:
            parts.append(f"{engine}: {error}")
            continue
        parts.append(f"```{language}\n# {engine}\n" + "\n".join(made.lines) + "\n```")
    return "\n\n".join([*parts, f"All engines: `pose-plugin export {named.path} --engine …`."])


def _limits(saved: Saved) -> str:
    record = saved.record
    lines = [
        f"Extended to {record['target_length']} tokens; positions beyond them are untrained.",
        "The longest distances are the rarest in training; measure retrieval at the length that you need.",
    ]
    window = saved.text.get("sliding_window")
    if window and saved.text.get("use_sliding_window") is not False:
        lines.append(f"Layers with a sliding window see {window} tokens, with any context window.")
    if record.get("method") == "qlora":
        lines.append("Trained on a 4-bit base: on a full-precision base, answers differ by the quantisation.")
    return "\n".join(f"- {line}" for line in lines)


def _newest_evaluation(path: Path) -> Path | None:
    found = [file.parent for file in path.glob("*/report.md") if (file.parent / "results.json").is_file()]
    return max(found, key=lambda each: (each / "report.md").stat().st_mtime, default=None)


def _bring(path: Path, evaluation: Path) -> Path:
    if not (evaluation / "report.md").is_file():
        raise PoSEError(f"--evaluation {evaluation} has no report.md; name the --output of `pose-plugin evaluate`")
    if evaluation.resolve().parent == path.resolve():
        return evaluation
    target = path / "evaluation"
    target.mkdir(exist_ok=True)
    for pattern in ("report.md", "results.json", "*.csv", "*.png"):
        for file in evaluation.glob(pattern):
            shutil.copy2(file, target / file.name)
    return target
