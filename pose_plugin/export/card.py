"""The model card: a section of README.md between two marks.

Axolotl, TRL, transformers and PEFT also write README.md: at the end of training, at checkpoints and at uploads. So the
section is inserted after each of them, in front of their text, and replaces only itself.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pose_plugin.checkpoints.saved import RECORD, Saved, public_name, read_saved
from pose_plugin.checkpoints.schema import Record
from pose_plugin.export import exporter
from pose_plugin.export.common import quoted
from pose_plugin.positions import SAMPLERS
from pose_plugin.rope.stretch import KINDS
from pose_plugin.utils.errors import PoSEError, shown
from pose_plugin.utils.files import listed_files, staged
from pose_plugin.utils.tables import counted

BEGIN, END = "<!-- pose-plugin: begin -->", "<!-- pose-plugin: end -->"
# With an owner: a name without one may be that of a folder, see `public_name`.
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OF_EVALUATION = {".md", ".csv", ".png"}
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
    folder: str | Path,
    evaluation: str | Path | None = None,
    tokenizer_maximum: int | None = None,
    foreign: bool = False,
) -> Path | None:
    """Write or renew the section in a folder's README.md, and copy the evaluation that it shows.

    Args:
        folder: of a model or an adapter.
        evaluation: output folder of `pose-plugin evaluate`; copied into the folder if it is elsewhere. Default: the
            newest one inside the folder.
        tokenizer_maximum: see `Saved`.
        foreign: also write it for a folder without a record; it then states what is unknown.

    Returns: the file, or None if nothing was written.

    Raises:
        PoSEError: an evaluation without report.md; a README.md that cannot be read, which stays unchanged.
    """
    path = Path(folder)
    if not (path / "config.json").is_file() or not (foreign or (path / RECORD).is_file()):
        return None
    saved = read_saved(path, tokenizer_maximum)
    # Read now, so that a damaged file is an error, and not a line of the card.
    _ = saved.adapter, saved.record, saved.tokenizer_maximum
    with staged(path) as stage:
        found = _newest_evaluation(path)
        if evaluation is not None:
            found = Path(evaluation)
            if not (found / "report.md").is_file():
                raise PoSEError(
                    f"--evaluation {evaluation} has no report.md; name the --output of `pose-plugin evaluate`"
                )
            if found.resolve().parent != path.resolve():
                copied = {file.name: file for file in _of_evaluation(found)}
                for file in listed_files(path / "evaluation" / "results.json"):
                    if file.name not in copied:
                        stage.remove(f"evaluation/{file.name}")
                for name, file in copied.items():
                    stage.copy(file, f"evaluation/{name}")
        stage.write("README.md", _card_text(saved, found))
    return path / "README.md"


def require_readable_card(folder: str | Path) -> None:
    """Raise PoSEError if a folder has a README.md into which no section can be put."""
    _read_card(Path(folder) / "README.md", dict)


def _card_text(saved: Saved, evaluation: Path | None) -> str:
    """Return README.md: its metadata, the section, and what others wrote."""
    metadata, text = _read_card(saved.path / "README.md", lambda old: _metadata(saved, old))
    body = re.sub(re.escape(BEGIN) + r".*?" + re.escape(END) + r"\n*", "", text, flags=re.S).strip()
    section = f"{BEGIN}\n{_section(saved, evaluation)}\n{END}\n"
    return f"---\n{metadata}\n---\n\n{section}" + (f"\n{body}\n" if body else "")


def _read_card(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> tuple[str, str]:
    """Return the metadata of a README.md as YAML, after a change, and its text."""
    from huggingface_hub import ModelCard, ModelCardData
    from yaml import YAMLError

    try:
        # utf-8-sig: a byte order mark would hide the metadata.
        old = file.read_text(encoding="utf-8-sig") if file.exists() else ""
        card = ModelCard(old if old.startswith("---") else f"---\n{{}}\n---\n{old}", ignore_metadata_errors=True)
        data = ModelCardData(**change(card.data.to_dict()), ignore_metadata_errors=True)
        return data.to_yaml(), card.text
    # Any type: the metadata may be of any shape, and the library does not expect each of them.
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, YAMLError) as error:
        raise PoSEError(
            f"{file} was not changed, as its text (UTF-8) or its metadata (YAML between two ---) cannot be read: "
            f"{shown(error, 300)}. Correct it, or move it away"
        ) from None


def _metadata(saved: Saved, old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata: what others wrote, without what the hub would reject, and what this package knows."""
    values = {str(key): value for key, value in old.items() if value not in (None, [], "")}
    values.setdefault("library_name", "transformers" if saved.base is None else "peft")
    values.setdefault("pipeline_tag", "text-generation")
    record = saved.record
    # The hub rejects cards whose base is not a repository's name, e.g. a local folder. PEFT writes such names.
    for key, known in (
        ("base_model", values.pop("base_model", None) or (record.base.name if record else None)),
        ("datasets", values.pop("datasets", None) or (record.data if record else None)),
    ):
        names = [name for name in _listed(known) if _on_the_hub(name)]
        if names:
            values[key] = names[0] if key == "base_model" and len(names) == 1 else names
    ours = ["long-context", "context-window-extension"]
    if record is not None:
        kind = record.rope.type if record.rope else None
        ours += ["pose", *([kind] if kind not in (None, "none") else [])]
    # PEFT also writes a tag for a base in a local folder.
    tags = _listed(old.get("tags"))
    kept = [tag for tag in tags if not tag.startswith("base_model:") or _on_the_hub(tag.rsplit(":", 1)[-1])]
    values["tags"] = list(dict.fromkeys([*kept, *ours]))
    return values


def _listed(value: Any) -> list[str]:
    """Return the texts of a value that should be a text or a list of them."""
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str)]


def _on_the_hub(name: Any) -> bool:
    """Return whether a name can be a repository's: not a path, not a file."""
    text = str(name)
    return bool(_REPOSITORY.fullmatch(text)) and not Path(text).exists() and not text.endswith((".jsonl", ".json"))


def _section(saved: Saved, evaluation: Path | None) -> str:
    warnings = [f"> **Warning:** {sentence}." for sentence in replace(saved, printed=Path(saved.name)).warnings]
    parts = [
        f"# {saved.name}: a context window of {saved.target} tokens",
        *warnings,
        _facts(saved),
        "## Evaluation",
        _evaluation(saved, evaluation),
        "## Serving",
        _serving(saved),
        "## Limits",
        _limits(saved),
    ]
    if saved.record is not None:  # of others' folders it is unknown how they were trained
        parts += ["## Citation", _CITATION]
    return "\n\n".join(parts)


def _facts(saved: Saved) -> str:
    record, before, target = saved.record, saved.original, saved.target
    kind = str(record.rope.type if record and record.rope else saved.kind)
    known = KINDS.get(kind)
    name, paper = (known.title, known.paper) if known else (kind, None)
    rope = name + (f" ([arXiv {paper}](https://arxiv.org/abs/{paper}))" if paper else "")
    rope += f", factor {saved.factor:g}" if saved.factor != 1 else ""
    window = f"{before} → {target} ({target / before:g}×)" if before and before != target else str(target)
    rows = {"window, tokens": window, "RoPE": rope, "theta": f"{saved.rope['rope_theta']}"}
    if saved.base is not None:
        rows["base"] = public_name(saved.base.name)
    if record is not None:
        base = public_name(record.base.name) if record.base.name else rows.get("base", "unknown")
        rows = {
            "window, tokens": window,
            "method": _method(record),
            "RoPE": rope,
            "theta before → after": f"{record.model.original_theta or '?'} → {saved.rope['rope_theta']}",
            "base": base + (f" at {record.base.revision}" if record.base.revision else ""),
            "data": ", ".join(map(public_name, record.data or [])) or "not recorded",
            "trained": _trained(record),
            "hardware": record.hardware or "not recorded",
            "software": ", ".join(f"{key} {value}" for key, value in record.versions.items()),
        }
    return "| | |\n| --- | --- |\n" + "\n".join(f"| {key} | {_cell(value)} |" for key, value in rows.items() if value)


def _method(record: Record) -> str:
    how = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA"}.get(record.method or "", record.method or "")
    adapter = record.adapter
    if adapter is not None and adapter.use_dora:
        how = how.replace("LoRA", "DoRA")
    if adapter is not None and adapter.r:
        how += f" of rank {adapter.r}"
    if adapter is not None and adapter.modules_to_save:
        how += f" and whole {', '.join(adapter.modules_to_save)}"
    if record.merged:
        how += ", merged"
    rows = f", windows of {record.train_length} tokens" if record.train_length else ""
    # None for a folder saved by a version that knows other samplers.
    sampler = SAMPLERS.get(str(record.sampler))
    if sampler is not None and not sampler.skips:
        return f"plain positions{rows}; {how}"
    has_chunks = sampler is not None and "chunks" in sampler.options()
    chunks = f", {counted(record.chunks, 'chunk')}" if has_chunks and record.chunks else ""
    paper = "[PoSE](https://arxiv.org/abs/2309.10400)"
    return f"{paper} (sampler {record.sampler}{chunks}){rows}; {how}"


def _trained(record: Record) -> str:
    trained = record.trained
    if trained is None:
        return "not recorded"
    drawn = trained.first_process or {}
    rows = counted(trained.rows_a_step, "row") if trained.rows_a_step else "? rows"
    text = f"{counted(trained.steps or 0, 'step')} of {rows}, {counted(trained.epochs or 0, 'epoch', 'g')}"
    if drawn.get("tokens"):
        share = "" if trained.processes in (None, 1) else f" in the first of {trained.processes} processes"
        text += f"; {drawn['tokens']} tokens drawn{share} (some fetched ahead)"
        text += f", farthest position {drawn.get('farthest')}"
    return text


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _evaluation(saved: Saved, evaluation: Path | None) -> str:
    if evaluation is None:
        lengths = ",".join(str(length) for length in dict.fromkeys((saved.original, saved.target)) if length)
        name = shlex.quote(saved.name)
        return (
            "Not evaluated. To put tables and pictures here:\n\n```bash\n"
            f"pose-plugin evaluate {name} --lengths {lengths} --output {name}/evaluation\npose-plugin card {name}\n```"
        )
    inside = evaluation.resolve().parent == saved.path.resolve()
    name = evaluation.name if inside else "evaluation"
    text = (evaluation / "report.md").read_text(encoding="utf-8", errors="replace").strip()
    pictures = [f"![{each.stem}]({name}/{each.name})" for each in _of_evaluation(evaluation) if each.suffix == ".png"]
    return "\n\n".join([text, *pictures])


def _serving(saved: Saved) -> str:
    # The name instead of the path: readers of the card have the folder elsewhere.
    base = public_name(saved.base.name) if saved.base else None
    named = replace(saved, printed=Path(saved.name), printed_base=base)
    parts = []
    for engine, language in (("transformers", "python"), ("vllm", "bash"), ("llama.cpp", "bash")):
        try:
            made = exporter(engine)(named)
        except PoSEError as error:
            parts.append(f"{engine}: {error}")
            continue
        parts.append(f"```{language}\n# {engine}\n" + "\n".join(made.lines) + "\n```")
    return "\n\n".join([*parts, f"All engines: `pose-plugin export {quoted(named)} --engine …`."])


def _limits(saved: Saved) -> str:
    record = saved.record
    extended = record is not None or (saved.original or saved.target) < saved.target
    first = "Extended to" if extended else "The window ends at"
    lines = [
        f"{first} {saved.target} tokens; positions beyond them are untrained.",
        "The longest distances are the rarest in training; measure retrieval at the length that you need.",
    ]
    window = saved.text.get("sliding_window")
    if window and saved.text.get("use_sliding_window") is not False:
        lines.append(f"Layers with a sliding window see {window} tokens, with any context window.")
    if record is not None and record.method == "qlora":
        lines.append("Trained on a 4-bit base: on a full-precision base, answers differ by the quantisation.")
    return "\n".join(f"- {line}" for line in lines if record is not None or "rarest" not in line)


def _of_evaluation(folder: Path) -> list[Path]:
    """Return the files of the newest report in a folder, as far as a card needs them."""
    files = listed_files(folder / "results.json") or folder.iterdir()
    names = sorted({file.name for file in files if file.suffix in _OF_EVALUATION} | {"results.json"})
    return [folder / name for name in names if (folder / name).is_file()]


def _newest_evaluation(path: Path) -> Path | None:
    found = [file.parent for file in path.glob("*/report.md") if (file.parent / "results.json").is_file()]
    return max(found, key=lambda each: (each / "report.md").stat().st_mtime, default=None)
