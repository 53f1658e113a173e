"""Write docs/options.md from the settings: python docs/make_options.py"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from pose_plugin import BeaconConfig
from pose_plugin.config import PoSESettings, RopeSettings
from pose_plugin.evaluation.settings import EvaluateSettings
from pose_plugin.positions import SAMPLERS
from pose_plugin.rope.stretch import KINDS

HEAD = """# Options

These are the keys of the `pose:` block in an Axolotl YAML, and the keyword arguments of `PoSECollator`. An unknown key
raises an error. `PoSECollator` takes `target_length` from the model's config if it is not given, as `extend_context`
has written it there. `L_t` is the target window, `L_c` the trained window and `L_0` the base model's window. The script
`docs/make_options.py` generates this page from the settings.

"""


def table(model: type) -> str:
    lines = ["| key | default | type | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():  # type: ignore[attr-defined]
        default = "required" if field.is_required() else _text(field.get_default(call_default_factory=True))
        names = {"type": list(KINDS), "sampler": list(SAMPLERS)}.get(name)
        kind = ", ".join(f"`{each}`" for each in names) if names else _type(field.annotation, name)
        lines.append(f"| `{name}` | {default} | {kind} | {field.description} |")
    return "\n".join(lines)


def beacons() -> str:
    lines = ["| key | default | type | meaning |", "|---|---|---|---|"]
    known = {field.name: field for field in dataclasses.fields(BeaconConfig)}
    described = inspect.getdoc(BeaconConfig).partition("Args:\n")[2].partition("\n\n")[0]
    _, *parts = re.split(r"^    (\w+): ", described, flags=re.M)
    meaning = {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)}
    for name, annotation in BeaconConfig.__annotations__.items():
        field = known[name]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        kind = str(annotation).removesuffix(" | None").replace(" | ", " or ")
        lines.append(f"| `{name}` | {_text(default)} | {kind} | {meaning[name]} |")
    return "\n".join(lines)


def _text(value: object) -> str:
    if isinstance(value, RopeSettings):
        return f"`{value.type}`"
    return "–" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(annotation: object, key: str) -> str:
    if annotation is RopeSettings:
        return "name or block"
    text = str(annotation).removesuffix(" | None").removeprefix("typing.Optional[")
    if text.startswith("dict["):
        return "block"
    if text.startswith("list["):
        kinds = {"int": "integers", "float": "numbers", "str": "paths" if key == "texts" else "names"}
        return f"list of {next(word for kind, word in kinds.items() if kind in text)}"
    if "Literal[" in text:
        return text[text.index("Literal[") + 8 : text.rindex("]")].replace("'", "`")
    for name, word in {"bool": "true or false", "int": "integer", "float": "number", "str": "path"}.items():
        if name in text.lower().replace("strictint", "int"):
            return word
    return text


def page() -> str:
    rope = "\n\n## The block `rope:`\n\n`rope: yarn` is short for `rope: {type: yarn}`.\n\n"
    evaluate = "\n\n## The block `evaluate:`\n\n[Evaluation](evaluation.md) explains the tasks.\n\n"
    pose = table(PoSESettings) + rope + table(RopeSettings) + evaluate + table(EvaluateSettings)
    beacon = "\n\n## The block `beacon:`\n\n`BeaconConfig` takes the same arguments, see [beacons](beacon.md).\n\n"
    return HEAD + pose + beacon + beacons() + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("options.md").write_text(page(), encoding="utf-8")
