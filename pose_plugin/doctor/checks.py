"""What can be wrong with a folder: one function per cause, in the order in which they are reported.

Each yields the problems that it finds. A config that a model's authors published must yield no warning and no error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from pose_plugin.checkpoints.saved import NO_LIMIT
from pose_plugin.doctor.folder import (
    ADAPTER,
    CONFIG,
    GENERATION,
    RECORD,
    REMOVED,
    TOKENIZER,
    Changes,
    Folder,
    Problem,
    number,
    whole,
)
from pose_plugin.rope.read import LENGTH_KEYS
from pose_plugin.utils.findings import Finding, Severity

# Kinds that transformers implements, and those that single families' own code reads.
_KINDS = {"default", "linear", "dynamic", "yarn", "longrope", "su", "llama3", "proportional", "mrope"}
_KINDS |= {"deepseek_yarn", "telechat3-yarn", "gptj"}
_USUAL = "default, linear, dynamic, yarn, longrope or llama3"
_NEEDS_FACTOR = ("linear", "dynamic", "yarn", "llama3")
_NEEDS_ORIGINAL = ("yarn", "llama3", "longrope")
# (model type, vocabulary, largest base that was trained with that window, its window): models whose published windows
# are known from the vocabulary.
_TRAINED = (("llama", 32000, 10000.0, 4096), ("llama", 128256, 500000.0, 8192))
# By model type and vocabulary, the base if the config names none and the class's default is another.
_BASES = {("qwen2", 151936): 1e6, ("qwen2", 152064): 1e6, ("qwen3", 151936): 1e6, ("llama", 128256): 500000.0}
# Keys that the published configs of a family have in their rope dict, and that its class reads.
_FAMILY_KEYS = {"qwen3_5": ("mrope_section", "partial_rotary_factor"), "qwen3_vl": ("mrope_section",)}
# Ratios of lengths that differ less than this are the same.
_SAME = 0.01


def diagnose(folder: Folder) -> list[Problem]:
    """Return all problems of a folder, errors first."""
    rank = {"error": 0, "warning": 1, "info": 2}
    found = [problem for check in CHECKS for problem in check(folder)]
    return sorted(found, key=lambda problem: rank[problem.finding.severity])


def _problem(
    cause: str,
    key: str,
    value: Any,
    happens: str,
    fix: str = "",
    severity: Severity = "warning",
    changes: Changes | None = None,
) -> Problem:
    return Problem(cause, Finding(key, value, happens, fix, severity), changes or {})


def damaged_files(folder: Folder) -> Iterator[Problem]:
    for name, reason in folder.damaged.items():
        yield _problem("damaged file", name, reason, "no reader can load it", "Save or download it again", "error")
    if CONFIG not in (*folder.files, *folder.damaged) and not folder.is_adapter:
        yield _problem(
            "no config",
            "config.json",
            "missing",
            "the folder holds neither a model nor an adapter",
            "Name the folder that has config.json or adapter_config.json",
            "error",
        )


def forms_disagree(folder: Folder) -> Iterator[Problem]:
    """rope_parameters and rope_scaling describe different ropes."""
    new, old = folder.new_form, folder.old_form
    top = number(folder.text.get("rope_theta"))
    inside = number((new or {}).get("rope_theta"))
    if top and inside and not math.isclose(top, inside, rel_tol=1e-6) and not old:
        yield _problem(
            "two bases",
            "rope_theta",
            f"{top:g} and {inside:g} in rope_parameters",
            "readers of transformers 4's form use the first, those of transformers 5's form the second",
            "Keep the base that the model was trained with, in both places",
            "error",
        )
    if not new or not old:
        return
    differing = [key for key in sorted(new.keys() | old.keys()) if _differs(key, new, old, top)]
    if differing:
        agree = [form for form in folder.forms() if _reaches(folder, form)]
        other = {"rope_parameters": "rope_scaling", "rope_scaling": "rope_parameters"}
        changes: Changes = {}
        if len(agree) == 1:
            changes = {CONFIG: {folder.place(other[agree[0]]): dict(new if agree[0] == "rope_parameters" else old)}}
        yield _problem(
            "forms disagree",
            differing[0],
            f"{_of(differing[0], new)} in rope_parameters and {_of(differing[0], old)} in rope_scaling",
            "transformers 5 reads rope_scaling if both are there, and engines differ, so the same folder has two ropes",
            f"Keep {agree[0]}, which fits max_position_embeddings={folder.maximum}"
            if changes
            else "Keep the one that the model was trained with, or write the same values into both",
            "error",
            changes,
        )


def _of(key: str, values: dict[str, Any]) -> Any:
    if key in ("type", "rope_type"):
        return values.get("rope_type") or values.get("type") or "default"
    return values.get(key)


def _differs(key: str, new: dict[str, Any], old: dict[str, Any], top: float | None) -> bool:
    first, second = _of(key, new), _of(key, old)
    if key == "rope_theta":
        second = second if second is not None else top
    if first is None or second is None:
        return key == "factor"
    one, two = number(first), number(second)
    if one is not None and two is not None:
        return not math.isclose(one, two, rel_tol=1e-6)
    return bool(first != second) and {str(first), str(second)} != {"su", "longrope"}


def _reaches(folder: Folder, form: str) -> bool:
    """Return whether a rope dict's factor × original is the maximum."""
    values = (folder.new_form if form == "rope_parameters" else folder.old_form) or {}
    factor, original = number(values.get("factor")), whole(values.get("original_max_position_embeddings"))
    return bool(factor and original and folder.maximum and abs(factor * original / folder.maximum - 1) < _SAME)


def nested_forms_disagree(folder: Folder) -> Iterator[Problem]:
    """Rope keys at the top of a config whose decoder is inside it."""
    if not folder.nested:
        return
    whole_config = folder.files[CONFIG]
    for key in ("rope_parameters", "rope_scaling"):
        top, inner = whole_config.get(key), folder.text.get(key)
        if isinstance(top, dict) and top and top != inner and (top.get("factor") or top.get("rope_theta")):
            yield _problem(
                "rope outside text_config",
                key,
                top,
                "the decoder reads its own text_config, so these keys have no effect",
                f"Move them to text_config.{key}",
                "error",
                {CONFIG: {(key,): REMOVED, folder.place(key): top}},
            )


def types(folder: Folder) -> Iterator[Problem]:
    """Numbers of another type, and kinds and factors that no reader takes."""
    value = folder.text.get("max_position_embeddings")
    if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        fixed = folder.maximum
        yield _problem(
            "maximum of another type",
            "max_position_embeddings",
            repr(value),
            "strict readers, such as transformers 5 and llama.cpp's converter, want a whole number",
            f"Write {fixed}" if fixed else "Write the window in tokens",
            "error",
            {CONFIG: {folder.place("max_position_embeddings"): fixed}} if fixed else {},
        )
    for name, form in (("rope_parameters", folder.new_form), ("rope_scaling", folder.old_form)):
        for key in ("factor", "rope_theta", "original_max_position_embeddings"):
            found = (form or {}).get(key)
            if isinstance(found, str) and number(found) is not None:
                yield _problem(
                    "number as text",
                    f"{name}.{key}",
                    repr(found),
                    "readers that compute with it fail, or compare text with numbers",
                    f"Write {number(found):g} without quotes",
                    "error",
                    {CONFIG: {folder.place(name, key): number(found)}} if form is not None else {},
                )


def kinds(folder: Folder) -> Iterator[Problem]:
    """A rope_type that nothing knows, or two of them."""
    forms = (("rope_parameters", folder.new_form), ("rope_scaling", folder.old_form))
    for name, form in forms:
        if not form:
            continue
        new, old = form.get("rope_type"), form.get("type")
        if new and old and {new, old} - {"mrope", "default"} and {new, old} != {"su", "longrope"} and new != old:
            yield _problem(
                "two kinds",
                f"{name}.type",
                old,
                f"rope_type={new} next to it says something else; newer readers use rope_type, older ones type",
                "Keep the kind that the model was trained with, in both keys",
                "error",
            )
        kind = new or old
        if kind is None and any(form.get(key) is not None for key in ("factor", "long_factor")):
            yield _problem(
                "no kind",
                f"{name}.rope_type",
                None,
                f"factor={form.get('factor')} is there, but no kind; readers ignore the dict or fail",
                "Add rope_type",
                "error",
            )
        elif kind is not None and (not isinstance(kind, str) or kind not in _KINDS):
            close = str(kind).lower().replace("-", "_")
            fix = {"none": "default", "yarn_scaling": "yarn", "su_rope": "longrope"}.get(close, close)
            known = fix in _KINDS
            yield _problem(
                "unknown kind",
                f"{name}.rope_type",
                kind,
                "transformers does not know it: it fails, or uses plain frequencies",
                f"Write {fix!r}" if known else f"Use {_USUAL}",
                "error",
                {CONFIG: {folder.place(name, "rope_type"): fix}} if known else {},
            )


def factors(folder: Folder) -> Iterator[Problem]:
    """A factor that is missing or does not stretch."""
    if folder.kind not in _NEEDS_FACTOR or (folder.kind == "dynamic" and folder.rope.get("alpha")):
        return
    name = folder.forms()[-1]
    value = folder.rope.get("factor")
    if value is None:
        ratio = folder.maximum / folder.original if folder.maximum and folder.original else None
        yield _problem(
            "no factor",
            f"{name}.factor",
            None,
            f"rope_type={folder.kind} cannot be computed without it",
            f"Write {ratio:g}, max_position_embeddings / original" if ratio else "Write target / original window",
            "error",
            {CONFIG: {folder.place(name, "factor"): ratio}} if ratio else {},
        )
    elif folder.factor is not None and folder.factor < 1:
        yield _problem(
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
    if folder.maximum < reached * (1 - _SAME):
        yield _problem(
            "maximum not raised",
            "max_position_embeddings",
            folder.maximum,
            f"the frequencies are stretched to {folder.factor:g} × {folder.original} = {reached}, but engines cut or "
            f"refuse texts beyond {folder.maximum} (vLLM from 0.30 on, SGLang, llama.cpp, TGI)",
            f"Write {reached}",
            "warning",
            {CONFIG: {folder.place("max_position_embeddings"): reached}},
        )
    elif folder.maximum > reached * (1 + _SAME):
        yield _problem(
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
    if folder.kind not in _NEEDS_ORIGINAL or folder.original or not folder.forms():
        return
    name = folder.forms()[-1]
    recorded = folder.files.get(RECORD, {}).get("model", {})
    known = whole(recorded.get("original_length")) if isinstance(recorded, dict) else None
    if known is None and folder.base is not None:
        known = folder.base.original or folder.base.maximum
    severity: Severity = "error" if folder.kind in ("llama3", "longrope") else "warning"
    yield _problem(
        "original window missing",
        f"{name}.original_max_position_embeddings",
        None,
        f"readers take max_position_embeddings={folder.maximum} as the window before stretching, or fail; if it is the "
        "raised window, all frequencies are wrong",
        f"Write {known}" if known else "Write the window of the model before it was extended",
        severity,
        {CONFIG: {folder.place(name, "original_max_position_embeddings"): known}} if known else {},
    )


def base_missing(folder: Folder) -> Iterator[Problem]:
    """No rope_theta, in a family whose base is not the class's default."""
    if folder.rope.get("rope_theta") is not None or not folder.text:
        return
    key = (str(folder.text.get("model_type")), whole(folder.text.get("vocab_size")) or 0)
    usual = _BASES.get(key)
    if folder.base is not None:
        usual = number(folder.base.rope.get("rope_theta")) or usual
    if folder.new_form is None and usual is None:
        return  # configs of 2023 name no base and mean the default
    where = folder.place("rope_parameters", "rope_theta") if folder.new_form is not None else folder.place("rope_theta")
    yield _problem(
        "base missing",
        "rope_theta",
        None,
        "readers use their default, 10000 in most classes"
        + (f", where this model's family has {usual:g}" if usual else ""),
        f"Write {usual:g}" if usual else "Write the base that the model was trained with",
        "error" if usual else "warning",
        {CONFIG: {where: usual}} if usual else {},
    )


def raised_without_rope(folder: Folder) -> Iterator[Problem]:
    """The maximum of a known family is raised, and its frequencies are not."""
    theta = number(folder.rope.get("rope_theta")) or 10000.0
    for kind, vocabulary, base, window in _TRAINED:
        same = folder.text.get("model_type") == kind and whole(folder.text.get("vocab_size")) == vocabulary
        if same and folder.kind == "default" and theta <= base and (folder.maximum or 0) > window:
            yield _problem(
                "maximum raised without frequencies",
                "max_position_embeddings",
                folder.maximum,
                f"models of this family with rope_theta={theta:g} and no scaling were trained up to {window}; beyond "
                "it they fail, and engines accept texts up to the maximum",
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
            yield _problem(
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
            yield _problem(
                "longrope list missing",
                f"{name}.{key}",
                values,
                "longrope has one factor per rotated pair, and no reader can compute it without them",
                "Copy the list from the model that was trained",
                "error",
            )
        elif pairs and len(values) != pairs:
            yield _problem(
                "longrope list of another length",
                f"{name}.{key}",
                f"{len(values)} values",
                f"a head of this model rotates {pairs} pairs",
                "Copy the list of a model with the same head_dim",
                "error",
            )


def other_windows(folder: Folder) -> Iterator[Problem]:
    """Other keys of config.json state a smaller window."""
    for key in LENGTH_KEYS:
        value = whole(folder.text.get(key))
        if value and folder.maximum and value < folder.maximum and folder.kind in ("default", "yarn"):
            yield _problem(
                "second window",
                key,
                value,
                f"engines take the smaller of it and max_position_embeddings={folder.maximum}",
                f"Write {folder.maximum}, or remove it",
                "warning",
                {CONFIG: {folder.place(key): folder.maximum}},
            )


def tokenizer_limit(folder: Folder) -> Iterator[Problem]:
    """The tokenizer's limit is below the window."""
    limit = whole(folder.files.get(TOKENIZER, {}).get("model_max_length"))
    if limit and folder.maximum and limit < min(folder.maximum, NO_LIMIT) and CONFIG in folder.files:
        yield _problem(
            "tokenizer limit",
            "model_max_length",
            limit,
            f"tokenizers warn or cut at {limit} tokens, and some engines take it as the window, which is "
            f"{folder.maximum}",
            f"Write {folder.maximum} into tokenizer_config.json",
            "warning",
            {TOKENIZER: {("model_max_length",): folder.maximum}},
        )


def generation_limit(folder: Folder) -> Iterator[Problem]:
    """generation_config.json ends generation inside the window."""
    limit = whole(folder.files.get(GENERATION, {}).get("max_length"))
    # 20 is the default of transformers, which it treats as not set.
    if limit and limit != 20 and folder.maximum and limit < folder.maximum:
        yield _problem(
            "generation limit",
            "max_length",
            limit,
            f"generate() ends at {limit} tokens with the prompt, and raises for longer prompts; the window is "
            f"{folder.maximum}",
            "Remove it from generation_config.json, and pass max_new_tokens",
            "warning",
            {GENERATION: {("max_length",): REMOVED}},
        )


def adapter(folder: Folder) -> Iterator[Problem]:
    """What an adapter needs from its base, and what engines do not load."""
    values = folder.files.get(ADAPTER)
    if values is None:
        return
    if values.get("use_dora"):
        yield _problem(
            "DoRA",
            "use_dora",
            True,
            "vLLM and SGLang do not serve DoRA adapters",
            "Merge it into its base before serving",
        )
    saved = values.get("modules_to_save") or []
    if (
        folder.base
        and folder.base.text.get("tie_word_embeddings")
        and "embed_tokens" in saved
        and "lm_head" not in saved
    ):
        yield _problem(
            "tied embeddings trained",
            "modules_to_save",
            saved,
            "the base ties its embeddings to lm_head, so a merge must copy the trained embeddings to both; "
            "`axolotl merge-lora` by its default method does not",
            "Merge with merge_method: legacy, then compare the merged model with the adapter: pose-plugin check",
        )
    yield from _adapter_rope(folder)


def _adapter_rope(folder: Folder) -> Iterator[Problem]:
    base = folder.base
    limit = whole(folder.files.get(TOKENIZER, {}).get("model_max_length"))
    if CONFIG not in folder.files:
        if base and limit and base.maximum and base.maximum < limit < NO_LIMIT:
            yield _problem(
                "adapter without its config",
                "config.json",
                "missing",
                f"the tokenizer was saved for {limit} tokens, and the base's config ends at {base.maximum}: loaded on "
                "it, the adapter runs with frequencies that it was not trained with",
                "Copy the config.json of the trained model into the adapter's folder, and load the base with it",
                "error",
            )
        return
    if base and (base.rope != folder.rope or base.maximum != folder.maximum):
        key = next((k for k in ("rope_type", "factor", "rope_theta") if base.rope.get(k) != folder.rope.get(k)), None)
        yield _problem(
            "base without the adapter's rope",
            key or "max_position_embeddings",
            folder.rope.get(key) if key else folder.maximum,
            f"the base's own config has {base.rope.get(key) if key else base.maximum}, and PEFT and engines load the "
            "base with that",
            "Load the base with the adapter's config.json (load_extended does), or pass the engine these overrides: "
            "pose-plugin export",
        )


def record(folder: Folder) -> Iterator[Problem]:
    """pose.json and config.json disagree, or nothing was trained."""
    values = folder.files.get(RECORD)
    if values is None or CONFIG not in folder.files:
        return
    target = whole(values.get("target_length"))
    if target and folder.maximum and target != folder.maximum:
        yield _problem(
            "record and config differ",
            "target_length",
            target,
            f"pose.json says that this window was trained, and config.json has {folder.maximum}",
            "Write the trained window into config.json",
            "error",
        )
    trained = values.get("trained")
    if isinstance(trained, dict) and trained.get("steps") == 0:
        yield _problem(
            "nothing trained",
            "steps",
            0,
            "pose.json records no training step, so the weights are the base's",
            "Look at the log of the run for the reason, and train again",
        )


def notes(folder: Folder) -> Iterator[Problem]:
    """What is as it should be, and surprises people."""
    if folder.stretched and folder.kind == "yarn":
        yield _problem(
            "static scaling",
            f"{folder.forms()[-1]}.factor",
            f"{folder.factor:g}",
            "the factor applies to texts of every length, so short texts change a little too",
            f"For texts up to N tokens, a factor of N / {folder.original or 'original'} is enough",
            "info",
        )
    if folder.kind == "dynamic" and not folder.rope.get("alpha"):
        yield _problem(
            "dynamic scaling",
            f"{folder.forms()[-1]}.rope_type",
            "dynamic",
            "the base depends on the length of each text, which several engines compute once, or not at all",
            "For equal answers everywhere, extend with a fixed kind such as yarn",
            "info",
        )
    if folder.new_form and not folder.old_form and folder.text.get("rope_theta") is None:
        yield _problem(
            "new form only",
            "rope_parameters",
            folder.kind,
            "readers of the form of transformers 4 (rope_scaling, rope_theta) do not see it and use base 10000",
            "For such readers write both forms: pose-plugin export --form 4",
            "info",
        )


CHECKS: tuple[Callable[[Folder], Iterator[Problem]], ...] = (
    damaged_files,
    types,
    kinds,
    factors,
    forms_disagree,
    nested_forms_disagree,
    maximum_not_raised,
    original_missing,
    base_missing,
    raised_without_rope,
    family_keys,
    longrope_lists,
    other_windows,
    adapter,
    tokenizer_limit,
    generation_limit,
    record,
    notes,
)
