"""Checks of config.json: its rope keys in two forms and several spellings, and types of its values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pose_plugin.doctor.folder import CONFIG, REMOVED, SAME, Folder, Problem, number, problem, whole
from pose_plugin.rope.kinds import YARN_BETAS, yarn_attention_factor

# Kinds that transformers implements, and those that single families' own code reads.
_KINDS = {"default", "linear", "dynamic", "yarn", "longrope", "su", "llama3", "proportional", "mrope"}
_KINDS |= {"deepseek_yarn", "telechat3-yarn", "gptj"}
_USUAL = "default, linear, dynamic, yarn, longrope or llama3"
# Keys of a rope dict that belong to the model and not to a kind of scaling.
_OF_THE_FAMILY = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
# Keys of a rope dict, or next to it, that hold a number.
_NUMBERS = (
    *("factor", "rope_theta", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"),
)


def forms_disagree(folder: Folder) -> Iterator[Problem]:
    """rope_parameters and rope_scaling describe different ropes."""
    new, old = folder.new_form, folder.old_form
    top = number(folder.text.get("rope_theta"))
    inside = number((new or {}).get("rope_theta"))
    if top and inside and not math.isclose(top, inside, rel_tol=1e-6) and not old:
        yield problem(
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
    if not differing:
        return
    bases = [each for each in (top, inside, number(old.get("rope_theta"))) if each]
    theta = bases[0] if bases else None
    # With two bases, more than the scaling is uncertain.
    meant = _meant(folder, new, old) if all(each == theta for each in bases) else None
    fix = "Keep the one that the model was trained with, or write the same values into both"
    if meant:
        fits = f", which fits max_position_embeddings={folder.maximum}" if _reaches(folder, meant) else ""
        fix = f"Write the values of {meant}{fits} into both"
    yield problem(
        "forms disagree",
        differing[0],
        f"{_of(differing[0], new)} in rope_parameters and {_of(differing[0], old)} in rope_scaling",
        "transformers 5 reads rope_scaling if both are there, and engines differ, so the same folder has two ropes",
        fix,
        "error",
        {CONFIG: _united(folder, new, old, theta, meant)} if meant else {},
    )


def _meant(folder: Folder, new: dict[str, Any], old: dict[str, Any]) -> str | None:
    """Return the form that the model was trained with; None if that is not certain."""
    reach = [form for form in folder.forms() if _reaches(folder, form)]
    if len(reach) == 1:
        return reach[0]
    # transformers 5 writes rope_parameters by itself. Who added a scaling by hand has meant it.
    by_hand = _of("rope_type", new) == "default" and _of("rope_type", old) != "default"
    return "rope_scaling" if by_hand else None


def _united(
    folder: Folder, new: dict[str, Any], old: dict[str, Any], theta: float | None, meant: str
) -> dict[tuple[str, ...], Any]:
    """Return the changes that give both forms the same values: those of one, with the base and keys of the family."""
    values = dict(new if meant == "rope_parameters" else old)
    for key in _OF_THE_FAMILY:
        if values.get(key) is None and (new.get(key) is not None or old.get(key) is not None):
            values[key] = new[key] if new.get(key) is not None else old[key]
    values["rope_type"] = values.pop("type", None) or values["rope_type"]
    changes: dict[tuple[str, ...], Any] = {}
    if theta is not None:
        # Older readers look for it at the top only.
        values["rope_theta"] = changes[folder.place("rope_theta")] = theta
    for name, form in (("rope_parameters", new), ("rope_scaling", old)):
        changes |= {folder.place(name, key): values.get(key, REMOVED) for key in values.keys() | form.keys()}
    return changes


def _of(key: str, values: dict[str, Any]) -> Any:
    if key in ("type", "rope_type"):
        return values.get("rope_type") or values.get("type") or "default"
    return values.get(key)


def _differs(key: str, new: dict[str, Any], old: dict[str, Any], top: float | None) -> bool:
    first, second = _of(key, new), _of(key, old)
    if key == "rope_theta":
        second = second if second is not None else top
    if first is None or second is None:
        given, usual = (second, _usual(key, new)) if first is None else (first, _usual(key, old))
        return key == "factor" or (usual is not None and not math.isclose(number(given) or 0, usual, rel_tol=1e-4))
    one, two = number(first), number(second)
    if one is not None and two is not None:
        return not math.isclose(one, two, rel_tol=1e-6)
    return bool(first != second) and {str(first), str(second)} != {"su", "longrope"}


def _usual(key: str, values: dict[str, Any]) -> float | None:
    """Return what readers compute with if a rope dict of yarn lacks a key."""
    if _of("rope_type", values) != "yarn":
        return None
    if key == "attention_factor" and not values.get("mscale"):
        return yarn_attention_factor(number(values.get("factor")) or 1.0)
    return YARN_BETAS.get(key)


def _reaches(folder: Folder, form: str) -> bool:
    """Return whether a rope dict's factor × original is the maximum."""
    values = (folder.new_form if form == "rope_parameters" else folder.old_form) or {}
    factor, original = number(values.get("factor")), whole(values.get("original_max_position_embeddings"))
    return bool(factor and original and folder.maximum and abs(factor * original / folder.maximum - 1) < SAME)


def nested_forms_disagree(folder: Folder) -> Iterator[Problem]:
    """Rope keys at the top of a config whose decoder is inside it."""
    if not folder.nested:
        return
    whole_config = folder.files[CONFIG]
    for key in ("rope_parameters", "rope_scaling"):
        top, inner = whole_config.get(key), folder.text.get(key)
        if isinstance(top, dict) and top and top != inner and (top.get("factor") or top.get("rope_theta")):
            yield problem(
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
    if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and folder.maximum):
        fixed = folder.maximum
        yield problem(
            "maximum of another type",
            "max_position_embeddings",
            repr(value),
            "strict readers, such as transformers 5 and llama.cpp's converter, want a whole number",
            f"Write {fixed}" if fixed else "Write the window in tokens",
            "error",
            {CONFIG: {folder.place("max_position_embeddings"): fixed}} if fixed else {},
        )
    for name in ("rope_parameters", "rope_scaling"):
        found = folder.text.get(name)
        if found is not None and not isinstance(found, dict):
            fix = "Write an object with rope_type and its values, or remove the key"
            yield problem("rope of another type", name, repr(found), "no reader can load it", fix, "error")
    for place, values in (
        (("rope_parameters",), folder.new_form),
        (("rope_scaling",), folder.old_form),
        ((), folder.text),
    ):
        for key in _NUMBERS:
            if _is_no_number(found := (values or {}).get(key)):
                yield _no_number(folder, (*place, key), found)
        if place and values and values.get("rope_theta", 1) is None:
            top = number(folder.text.get("rope_theta"))
            yield problem(
                "no number",
                f"{place[0]}.rope_theta",
                "null",
                "transformers 5 reads it instead of any other base, and fails",
                f"Write {top:g}" if top else "Write the base that the model was trained with",
                "error",
                {CONFIG: {folder.place(*place, "rope_theta"): top}} if top else {},
            )


def _is_no_number(value: Any) -> bool:
    # A few published configs have a list with one value per layer.
    if value is None or isinstance(value, (list, dict)):
        return False
    return isinstance(value, str) or number(value) is None


def _no_number(folder: Folder, place: tuple[str, ...], found: Any) -> Problem:
    key, meant = ".".join(place), number(found)
    if meant is None:
        return problem("no number", key, repr(found), "no reader can compute with it", "Write a number", "error")
    # A converter refuses the float 32768.0 as a window.
    right = whole(meant) if place[-1] == "original_max_position_embeddings" else None
    return problem(
        "number as text",
        key,
        repr(found),
        "readers that compute with it fail, or compare text with numbers",
        f"Write {meant:g} without quotes",
        "error",
        {CONFIG: {folder.place(*place): right or meant}},
    )


def kinds(folder: Folder) -> Iterator[Problem]:
    """A rope_type that nothing knows, or two of them."""
    forms = (("rope_parameters", folder.new_form), ("rope_scaling", folder.old_form))
    for name, form in forms:
        if not form:
            continue
        new, old = form.get("rope_type"), form.get("type")
        named = {str(new), str(old)}  # in a damaged file they may be of any type
        if new and old and named - {"mrope", "default"} and named != {"su", "longrope"} and new != old:
            yield problem(
                "two kinds",
                f"{name}.type",
                old,
                f"rope_type={new} next to it says something else; newer readers use rope_type, older ones type",
                "Keep the kind that the model was trained with, in both keys",
                "error",
            )
        kind = new or old
        if kind is None and any(form.get(key) is not None for key in ("factor", "long_factor")):
            yield problem(
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
            yield problem(
                "unknown kind",
                f"{name}.rope_type",
                kind,
                "transformers does not know it: it fails, or uses plain frequencies",
                f"Write {fix!r}" if known else f"Use {_USUAL}",
                "error",
                {CONFIG: {folder.place(name, "rope_type"): fix}} if known else {},
            )
