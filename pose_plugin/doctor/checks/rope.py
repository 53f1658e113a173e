"""Checks of config.json: whether the rope's values fit each other, the window and the model's family."""

from __future__ import annotations

from collections.abc import Iterator

from pose_plugin.checkpoints.saved import NEED_ORIGINAL, RECORD, USUAL_THETA
from pose_plugin.doctor.folder import CONFIG, SAME, Folder, Problem, number, problem, whole
from pose_plugin.export.engines import NEED_FACTOR
from pose_plugin.utils.findings import Severity

# (model type, vocabulary, largest base that was trained with that window, its window): models whose published windows
# are known from the vocabulary.
_TRAINED = (("llama", 32000, 10000.0, 4096), ("llama", 128256, 500000.0, 8192))
# By model type and vocabulary, the base if the config names none and the class's default is another.
_BASES = {("qwen2", 151936): 1e6, ("qwen2", 152064): 1e6, ("qwen3", 151936): 1e6, ("llama", 128256): 500000.0}
# Keys that the published configs of a family have in their rope dict, and that its class reads.
_FAMILY_KEYS = {"qwen3_5": ("mrope_section", "partial_rotary_factor"), "qwen3_vl": ("mrope_section",)}


def factors(folder: Folder) -> Iterator[Problem]:
    """A factor that is missing or does not stretch."""
    if folder.kind not in NEED_FACTOR or (folder.kind == "dynamic" and folder.rope.get("alpha")):
        return
    name = folder.forms()[-1]
    value = folder.rope.get("factor")
    if value is None:
        ratio = folder.maximum / folder.original if folder.maximum and folder.original else None
        usual = "Write target / original window"
        if folder.kind == "llama3":  # Llama 3.1 has 8 for 16 times the window, Llama 3.2 has 32
            ratio, usual = None, "Copy the factor of the model before training"
        yield problem(
            "no factor",
            f"{name}.factor",
            None,
            f"rope_type={folder.kind} cannot be computed without it",
            f"Write {ratio:g}, max_position_embeddings / original" if ratio else usual,
            "error",
            {CONFIG: {folder.place(form, "factor"): ratio for form in folder.forms()}} if ratio else {},
        )
    elif folder.factor is not None and folder.factor < 1:
        yield problem(
            "factor below 1",
            f"{name}.factor",
            value,
            "it makes all positions denser and the window shorter",
            f"If it is original / target, write {1 / folder.factor:g}"
            if folder.factor > 0
            else "Write a number above 1",
            "error",
        )


def maximum_not_raised(folder: Folder) -> Iterator[Problem]:
    """max_position_embeddings is below factor × original."""
    reached = folder.reached
    if reached is None or not folder.maximum or not folder.original:
        return
    if folder.maximum < reached * (1 - SAME):
        yield problem(
            "maximum not raised",
            "max_position_embeddings",
            folder.maximum,
            f"the frequencies are stretched to {folder.factor:g} × {folder.original} = {reached}, but engines cut or "
            f"refuse texts beyond {folder.maximum} (vLLM from 0.30 on, SGLang, llama.cpp, TGI)",
            f"Write {reached}",
            "warning",
            {CONFIG: {folder.place("max_position_embeddings"): reached}},
        )
    elif folder.maximum > reached * (1 + SAME):
        yield problem(
            "factor below maximum",
            f"{folder.forms()[-1]}.factor",
            f"{folder.factor:g}",
            f"{folder.factor:g} × {folder.original} = {reached}, but max_position_embeddings={folder.maximum}: some "
            "engines use the factor as written and others maximum / original, so they differ",
            f"Write factor={folder.maximum / folder.original:g} if the model was trained up to {folder.maximum}, or "
            f"max_position_embeddings={reached} if not",
        )


def original_missing(folder: Folder) -> Iterator[Problem]:
    """The original window is not stated, so readers take the raised one."""
    if folder.kind not in NEED_ORIGINAL or folder.original or not folder.forms():
        return
    name = folder.forms()[-1]
    recorded = folder.files.get(RECORD, {}).get("model", {})
    known = whole(recorded.get("original_length")) if isinstance(recorded, dict) else None
    if known is None and folder.base is not None:
        known = folder.base.original or folder.base.maximum
    severity: Severity = "error" if folder.kind in ("llama3", "longrope") else "warning"
    yield problem(
        "original window missing",
        f"{name}.original_max_position_embeddings",
        None,
        f"readers take max_position_embeddings={folder.maximum} as the window before stretching, or fail; if it is the "
        "raised window, all frequencies are wrong",
        f"Write {known}" if known else "Write the window of the model before training; --base names that model",
        severity,
        {CONFIG: {folder.place(form, "original_max_position_embeddings"): known for form in folder.forms()}}
        if known
        else {},
    )


def base_missing(folder: Folder) -> Iterator[Problem]:
    """No rope_theta, in a family whose base is not the class's default."""
    if folder.rope.get("rope_theta") is not None or not folder.text:
        return
    key = (str(folder.text.get("model_type")), whole(folder.text.get("vocab_size")) or 0)
    usual, source = _BASES.get(key), "this model's family"
    if folder.base is not None and folder.base.rope.get("rope_theta") is not None:
        usual, source = number(folder.base.rope["rope_theta"]), "the model before training"
    inside = number((folder.new_form or {}).get("rope_theta"))
    if inside is not None:
        # transformers 5 reads rope_scaling instead of the whole of rope_parameters, with the base in it.
        usual, source = inside, "rope_parameters"
    severity: Severity = "error" if usual and usual != USUAL_THETA else "warning"
    if folder.new_form is None and usual is None:
        # Configs of 2023 name no base and mean the default, a few of them with a scaling.
        if folder.kind == "default":
            return
        severity = "info"
    places = [folder.place("rope_parameters", "rope_theta")] if folder.new_form is not None and not inside else []
    places += [folder.place("rope_theta")] if folder.old_form is not None or folder.new_form is None else []
    yield problem(
        "rope_theta missing",
        "rope_theta",
        None,
        "readers use their default, 10000 in most classes" + (f"; {source} has {usual:g}" if usual else ""),
        f"Write {usual:g}" if usual else "Write the base that the model was trained with; --base names that model",
        severity,
        {CONFIG: dict.fromkeys(places, usual)} if usual else {},
    )


def trained_window(folder: Folder) -> tuple[int, str] | None:
    """Return the window that plain frequencies were trained for, tokens, and who says so, if the maximum is above it.

    Returns None also for a folder with a record of its training, and for an adapter.
    """
    if folder.kind != "default" or not folder.maximum or folder.is_adapter or RECORD in folder.files:
        return None
    theta = number(folder.rope.get("rope_theta")) or USUAL_THETA
    base = folder.base
    if base is not None and base.maximum and base.kind == "default":
        same = (number(base.rope.get("rope_theta")) or USUAL_THETA) == theta
        if same and base.maximum < folder.maximum:
            return base.maximum, "the model before training has the same frequencies and was made for"
    for kind, vocabulary, largest, window in _TRAINED:
        same = folder.text.get("model_type") == kind and whole(folder.text.get("vocab_size")) == vocabulary
        if same and theta <= largest and folder.maximum > window:
            return window, f"models of this family with rope_theta={theta:g} and no scaling were trained up to"
    return None


def raised_without_rope(folder: Folder) -> Iterator[Problem]:
    """The maximum is raised, and the frequencies are not."""
    found = trained_window(folder)
    if found is None:
        return
    window, reason = found
    yield problem(
        "maximum raised without frequencies",
        "max_position_embeddings",
        folder.maximum,
        f"{reason} {window} tokens; without training at longer distances it fails beyond them, and engines "
        "accept texts up to the maximum",
        "Add the scaling that the model was trained with (its trainer's rope options), or write "
        f"max_position_embeddings={window}",
    )


def family_keys(folder: Folder) -> Iterator[Problem]:
    """Keys of the rope dict that the family's own code reads, lost when the dict was replaced."""
    for family, keys in _FAMILY_KEYS.items():
        if not str(folder.text.get("model_type")).startswith(family) or not folder.forms():
            continue
        missing = [key for key in keys if folder.rope.get(key) is None and folder.text.get(key) is None]
        if missing and folder.kind != "default":
            yield problem(
                "keys of the family missing",
                f"{folder.forms()[-1]}.{missing[0]}",
                None,
                f"models of type {folder.text['model_type']} read {', '.join(missing)} there, and use another default "
                "without",
                "Copy the keys from the base's config.json",
                "error",
            )


def longrope_lists(folder: Folder) -> Iterator[Problem]:
    """longrope's lists are missing or have another length than the rotated pairs."""
    if folder.kind != "longrope":
        return
    name = folder.forms()[-1]
    pairs = folder.rotary_dim // 2 if folder.rotary_dim else None
    for key in ("short_factor", "long_factor"):
        values = folder.rope.get(key)
        if not isinstance(values, list):
            yield problem(
                "longrope list missing",
                f"{name}.{key}",
                values,
                "longrope has one factor per rotated pair, and no reader can compute it without them",
                "Copy the list from the model that was trained",
                "error",
            )
        elif pairs and len(values) != pairs:
            yield problem(
                "longrope list of another length",
                f"{name}.{key}",
                f"{len(values)} values",
                f"a head of this model rotates {pairs} pairs",
                "Copy the list of a model with the same head_dim",
                "error",
            )


def notes(folder: Folder) -> Iterator[Problem]:
    """What is as it should be, and surprises people."""
    if folder.stretched and folder.kind == "yarn":
        yield problem(
            "static scaling",
            f"{folder.forms()[-1]}.factor",
            f"{folder.factor:g}",
            "the factor applies to texts of every length, so short texts change a little too",
            f"For texts up to N tokens, a factor of N / {folder.original or 'original'} is enough",
            "info",
        )
    if folder.kind == "linear" and folder.stretched and folder.maximum:
        multiplied = round(folder.maximum * (folder.factor or 1))
        yield problem(
            "linear scaling",
            f"{folder.forms()[-1]}.factor",
            f"{folder.factor:g}",
            f"vLLM and SGLang multiply the window by it, {multiplied}, and other engines take {folder.maximum}",
            f"If the model was trained up to {folder.maximum}, start vLLM with --max-model-len {folder.maximum} and "
            f"SGLang with --context-length {folder.maximum}",
            "info",
        )
    if folder.kind == "dynamic" and not folder.rope.get("alpha"):
        yield problem(
            "dynamic scaling",
            f"{folder.forms()[-1]}.rope_type",
            "dynamic",
            "the base depends on the length of each text, which several engines compute once, or not at all",
            "For equal answers everywhere, extend with a fixed kind such as yarn",
            "info",
        )
    if folder.new_form and not folder.old_form and folder.text.get("rope_theta") is None:
        yield problem(
            "new form only",
            "rope_parameters",
            folder.kind,
            "readers of the form of transformers 4 (rope_scaling, rope_theta) do not see it and use base 10000",
            "For such readers write both forms: pose-plugin export --form 4",
            "info",
        )
