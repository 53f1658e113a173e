"""What is planned: from an Axolotl YAML or from options, with the base's config.json beside it."""

from __future__ import annotations

import ast
import copy
import difflib
import functools
import importlib.util
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pose_plugin.config import PoSESettings, parse_settings
from pose_plugin.plan.memory import Run
from pose_plugin.utils.errors import FORGOTTEN_LINE, PoSEError
from pose_plugin.utils.files import read_json

# As of the lengths in a `pose:` block.
LONGEST = 2**31 - 1
_OPTIMIZERS = {
    "adamw": ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"),
    "adamw_8bit": ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"),
    "adamw_4bit": ("adamw_torch_4bit",),
    "lion": ("lion_32bit", "paged_lion_32bit", "lion_pytorch"),
    "lion_8bit": ("lion_8bit", "paged_lion_8bit"),
    "adafactor": ("adafactor",),
    "sgd": ("sgd",),
}
_ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED_LOSSES = ("liger_fused_linear_cross_entropy", "cut_cross_entropy", "chunked_cross_entropy")
# Optimizers that keep what bf16 rounds away, by themselves or with an argument; see integrations/precision.py.
_EXACT = ("optimi_adamw", "stable_adamw", "flash_adamw", "flash_adam", "flash_sgd", "flash_sgdw", "flash_lion")
_EXACT_IF = ("bf16_stochastic_round", "use_kahan_summation")
# Keys of this package's plugin.
_OWN = frozenset({"pose", "beacon"})


@dataclass(frozen=True)
class Inputs:
    """Everything a plan is made from.

    Attributes:
        base: the base's name or folder.
        config: its config.json.
        settings: the `pose:` block with the window filled in; None where the run has none.
        run: what memory depends on.
        accumulate: batches of a GPU in one step.
        steps: of the training; None where neither the YAML nor the data on this machine tell.
        rows: of the data set; None where they are not known.
        packed: several documents share a row.
        chat: rows are made by a chat template.
        beacon: the values of the YAML, where its adapter is beacon; else None.
        bf16: how the YAML asks for bf16, where the trained weights are then kept in it; None where small steps are not
            rounded away.
        learning_rate: where the YAML has one.
        notes: what was taken for granted.
        warnings: of keys and plugins.
    """

    base: str
    config: Mapping[str, Any]
    settings: PoSESettings | None
    run: Run
    accumulate: int = 1
    steps: int | None = None
    rows: int | None = None
    packed: bool = False
    chat: bool = False
    beacon: Mapping[str, Any] | None = None
    bf16: str | None = None
    learning_rate: float | None = None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def from_yaml(path: str | Path, base: str | None = None, **given: Any) -> Inputs:
    """Reads an Axolotl YAML.

    Args:
        path: of the file.
        base: a folder with the base's config.json, where the name in the YAML is of the Hub.
        given: what is not in the YAML or shall differ: `gpus`, `steps`, `rows`.

    Raises:
        PoSEError: the file cannot be read, or the base's config.json is not on this machine.
    """
    try:
        import yaml
    except ImportError:
        raise PoSEError("reading a YAML needs PyYAML: pip install pyyaml, or give the settings as options") from None
    path = Path(path)
    if not path.is_file():
        raise PoSEError(f"{path} is no file; give an Axolotl YAML, or --target-length and --train-length")
    try:
        cfg = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PoSEError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(cfg, dict) or not cfg.get("base_model") or not isinstance(cfg["base_model"], str):
        raise PoSEError(f"{path} has no base_model: an Axolotl YAML is needed")
    found = from_values(cfg, base, **given)
    warnings = unknown_keys(cfg)
    if (found.settings or found.beacon is not None) and not _names_us(cfg):
        warnings.append(FORGOTTEN_LINE)
    return replace(found, warnings=warnings)


def _names_us(cfg: Mapping[str, Any]) -> bool:
    plugins = cfg.get("plugins") or []
    if not isinstance(plugins, list):
        raise PoSEError(f"plugins={plugins!r} is no list; write plugins: [pose_plugin]")
    return any(str(name).startswith("pose_plugin") for name in plugins)


def from_values(cfg: Mapping[str, Any], base: str | None = None, **given: Any) -> Inputs:
    """The same for the values of an Axolotl YAML."""
    notes: list[str] = []
    name = str(cfg["base_model"])
    config = base_config(base or cfg.get("base_model_config") or name, name)
    window = number(cfg, "sequence_len", None, most=LONGEST)
    beacon = cfg if cfg.get("adapter") == "beacon" else None
    if beacon is not None or cfg.get("beacon") is not None:
        _refuse_as_the_run(cfg, notes)
    settings = None
    if cfg.get("pose") is not None:
        given_block = cfg["pose"]
        if isinstance(given_block, dict) and given_block.get("train_length") is None and window:
            given_block = {**given_block, "train_length": window}
        settings = parse_settings(given_block)
    size = (settings.train_length if settings else None) or window
    if not size:
        raise PoSEError("the YAML has neither sequence_len nor pose.train_length, the trained window in tokens")
    batch, accumulate = number(cfg, "micro_batch_size", 1), number(cfg, "gradient_accumulation_steps", 1)
    gpus = int(given.get("gpus") or 1)
    rows = given.get("rows") or _rows(cfg, notes)
    run = replace(
        method(cfg, notes), **sharding(cfg, notes), gpus=gpus, rows=batch, window=int(size),
        optimizer=optimizer(str(cfg.get("optimizer") or "adamw_torch_fused"), notes),
        checkpointing=bool(cfg.get("gradient_checkpointing")),
        eager=cfg.get("attn_implementation") == "eager",
        fused_loss=any(cfg.get(key) for key in FUSED_LOSSES),
    )  # fmt: skip
    packed = bool(cfg.get("sample_packing"))
    # -1, as 0, leaves it to the epochs.
    steps = given.get("steps") or max(number(cfg, "max_steps", 0, least=-1), 0)
    epochs = number(cfg, "num_epochs", 1, least=0, whole=False) or 1
    gone = [each["path"] for each in _datasets(cfg) if _is_missing_file(each.get("path"))]
    if not steps and not rows and gone:
        notes.append(f"datasets: {gone[0]} is not on this machine, as seen from here, so its rows are not counted")
    if not steps and rows:
        if not given.get("rows"):
            notes += _of_rows(rows, packed, any(each.get("type") == "completion" for each in _datasets(cfg)))
        steps = max(1, int(rows * epochs / (batch * accumulate * gpus)))
    return Inputs(
        base=name, config=config, settings=settings, run=run, accumulate=accumulate,
        steps=int(steps) if steps else None, rows=rows, packed=packed,
        chat=any("chat_template" in str(each.get("type")) for each in _datasets(cfg)),
        beacon=beacon, bf16=_narrow(cfg, run),
        learning_rate=number(cfg, "learning_rate", None, least=0, whole=False), notes=notes,
    )  # fmt: skip


def _is_missing_file(path: Any) -> bool:
    """Whether that names a file, not a data set of the Hub, which is not here."""
    return Path(str(path)).suffix in (".jsonl", ".json", ".parquet", ".csv") and not Path(str(path)).exists()


def _refuse_as_the_run(cfg: Mapping[str, Any], notes: list[str]) -> None:
    """What the real run refuses of a `beacon:` block and beside it, by the same function.

    Raises:
        PoSEError: as the run would; and for blocks that are none, which Axolotl refuses by itself.
    """
    for key in ("pose", "gradient_checkpointing_kwargs", "bnb_config_kwargs", "overrides_of_model_kwargs"):
        block(cfg, key)
    try:
        from pose_plugin.frameworks.axolotl_beacon import prepare

        # It sets keys as the run needs them.
        prepare(copy.deepcopy(dict(cfg)))
    except ImportError:
        notes.append('the `beacon:` block is not checked: PEFT is missing, pip install "peft>=0.20"')


def _narrow(cfg: Mapping[str, Any], run: Run) -> str | None:
    """How bf16 is asked for, where trained weights stay in it without a float32 copy."""
    asked = next((f"{key}={cfg[key]}" for key in ("bf16", "bfloat16") if cfg.get(key)), None)
    if asked is None and cfg.get("bf16") is None:
        asked = "bf16=auto, the default"
    if cfg.get("fp16"):
        asked = None
    kept = run.master or run.trained_bytes != 2 or keeps_remainders(cfg)
    return None if kept else asked


def _of_rows(rows: int, packed: bool, completion: bool) -> list[str]:
    """How lines of a file and rows of the training differ."""
    if packed and completion:
        return [
            f"steps are counted as if each of the {rows} lines were a row, and there may be more or fewer: type "
            "completion makes several pieces of a text longer than sequence_len (and leaves out what is behind 64 of "
            "them), and sample_packing puts several pieces into a row. Axolotl logs the number"
        ]
    if packed:
        return [
            f"sample_packing puts several of the {rows} documents into a row, so there are at most as many steps "
            "as counted here; Axolotl logs the number"
        ]
    if completion:
        return [
            f"each of the {rows} lines is counted as one row, but type completion makes several of a text longer "
            "than sequence_len, so there may be more steps than counted here; Axolotl logs the number"
        ]
    return []


def _datasets(cfg: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    value = cfg.get("datasets") or []
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise PoSEError(f"datasets={value!r} is no list of blocks; write e.g. `- path: rows.jsonl` below `datasets:`")
    return value


def base_config(place: str, name: str | None = None) -> dict[str, Any]:
    """The dict of a base's config.json: from a folder, or from the cache of the Hub's client.

    Raises:
        PoSEError: it is not on this machine.
    """
    folder = Path(place)
    file = folder if folder.is_file() else folder / "config.json"
    if not file.is_file():
        cached = _cached(place)
        if cached is None:
            where = "" if name in (None, place) else f" (looked in {place})"
            raise PoSEError(
                f"the config.json of {name or place} is not on this machine{where}. Give a folder that has it by "
                "--base FOLDER; the weights are not needed"
            )
        file = cached
    return read_json(file)


def _cached(name: str) -> Path | None:
    """From the cache of the Hub's client; the one small file is fetched where it is not and the Hub may be asked."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        return None
    try:
        return Path(hf_hub_download(name, "config.json"))
    except (HFValidationError, HfHubHTTPError, OSError, ValueError):
        # No such name, no right to it, no network, or offline by HF_HUB_OFFLINE.
        return None


def _rows(cfg: Mapping[str, Any], notes: list[str]) -> int | None:
    """Lines of local JSON lines files; None if any part of the data is somewhere else."""
    count = 0
    for each in _datasets(cfg):
        path = Path(str(each.get("path")))
        if path.suffix != ".jsonl" or not path.is_file():
            return None
        with path.open("rb") as file:
            count += sum(bool(line.strip()) for line in file)
    if count and cfg.get("val_set_size"):
        notes.append(f"val_set_size={cfg['val_set_size']} takes its part of the {count} rows")
        share = number(cfg, "val_set_size", 0, least=0, whole=False)
        held = count * share if share < 1 else share
        if count - held < 1:
            raise PoSEError(f"val_set_size={cfg['val_set_size']} leaves none of the {count} rows to train on")
        count = int(count - held)
    if not count and (files := [str(each["path"]) for each in _datasets(cfg)]):
        notes.append(f"datasets: there is no row in {', '.join(files)}; the training would have nothing to read")
    return count or None


def method(cfg: Mapping[str, Any], notes: list[str]) -> Run:
    """How weights are kept and what is trained; what is taken for granted is added to `notes`.

    Raises:
        PoSEError: a value of a wrong type.
    """
    adapter = cfg.get("adapter")
    # Axolotl without bf16 and fp16 computes in float32, as models are then loaded.
    wide = 2 if cfg.get("bf16") in (True, "auto", None) or cfg.get("bfloat16") or cfg.get("fp16") else 4
    if cfg.get("bf16") not in (True, False, "auto", None):
        notes.append(f"bf16={cfg.get('bf16')!r} is refused by Axolotl: true, false or auto; reckoned as false")
    if adapter is None:
        return Run(method="full", weight_bytes=wide, trained_bytes=wide)
    quantised: Any = "nf4" if cfg.get("load_in_4bit") else "int8" if cfg.get("load_in_8bit") else None
    if adapter == "beacon":
        values = block(cfg, "beacon")
        targets = values.get("target_modules") or ["q_proj", "k_proj", "v_proj", "o_proj"]
        if isinstance(targets, str) or values.get("exclude_modules"):
            notes.append("target_modules as a pattern, and exclude_modules, are reckoned as q, k, v and o projections")
            targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        return Run(
            method="beacon",
            lora_rank=number(values, "rank", 0, least=0),
            lora_targets=list(targets),
            quantised=quantised,
            weight_bytes=wide,
            trained_bytes=4 if values.get("dtype") == "float32" else wide,
        )
    if adapter not in ("lora", "qlora"):
        notes.append(f"adapter={adapter} is reckoned as LoRA")
    elif adapter == "qlora" and not quantised:
        notes.append("adapter=qlora without load_in_4bit: true is refused by Axolotl; reckoned as LoRA")
    saved = cfg.get("lora_modules_to_save") or []
    if not isinstance(saved, list):
        raise PoSEError(f"lora_modules_to_save={saved!r} is no list; write [{saved}]")
    given = cfg.get("lora_target_modules")
    targets = list(given) if isinstance(given, list) else []
    if isinstance(given, str) and given != "all-linear" and not cfg.get("lora_target_linear"):
        notes.append(f"lora_target_modules={given} is reckoned as all linear maps")
    if cfg.get("lora_target_linear") or not targets:
        targets = [*_ALL_LINEAR, *(name for name in targets if name not in _ALL_LINEAR)]
    methods: dict[Any, Any] = {"nf4": "qlora", "int8": "8bit", None: "lora"}
    return Run(
        method=methods[quantised],
        lora_rank=number(cfg, "lora_r", 8),
        lora_targets=targets,
        saved_modules=saved,
        quantised=quantised,
        weight_bytes=wide,
        trained_bytes=4,
    )


def sharding(cfg: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """ZeRO stage, offloading, and whether float32 copies of trained bf16 weights are kept.

    Raises:
        PoSEError: a value of a wrong type.
    """
    # Adapters are in float32 themselves; beacons are as the base is.
    narrow = cfg.get("adapter") is None
    narrow = narrow or (cfg.get("adapter") == "beacon" and block(cfg, "beacon").get("dtype") != "float32")
    if cfg.get("fsdp_config") or cfg.get("fsdp_version") or cfg.get("fsdp"):
        values = block(cfg, "fsdp_config")
        offload = bool(values.get("offload_params") or values.get("fsdp_offload_params"))
        whole = values.get("reshard_after_forward", values.get("fsdp_reshard_after_forward", True))
        version = cfg.get("fsdp_version") or values.get("fsdp_version") or values.get("version")
        # Gathered weights that are kept until the backward pass are whole at its beginning. accelerate widens weights
        # under FSDP 1; under FSDP 2 Axolotl's own way of dividing them leaves bf16 as it is.
        return {"stage": 3 if whole else 2, "offload": offload, "master": narrow and str(version) != "2"}
    path = cfg.get("deepspeed")
    if not path:
        return {}
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8")) if isinstance(path, str) else path
    except (OSError, ValueError):
        stage = next((n for n in (1, 2, 3) if f"zero{n}" in str(path)), 0)
        notes.append(f"deepspeed={path} cannot be read here; taken for ZeRO-{stage} by its name")
        return {"stage": stage, "master": narrow}
    zero = block(block({"deepspeed": given}, "deepspeed"), "zero_optimization")
    stage = number(zero, "stage", 0, least=0)
    if stage > 3:
        raise PoSEError(f"deepspeed: zero_optimization.stage={stage} cannot work: the stages of ZeRO are 0 to 3")
    device = block(zero, "offload_optimizer").get("device")
    return {"stage": stage, "offload": device not in (None, "none"), "master": narrow}


def optimizer(name: str, notes: list[str]) -> str:
    for known, names in _OPTIMIZERS.items():
        if name in names or name == known:
            return known
    notes.append(f"optimizer={name} is reckoned as AdamW")
    return "adamw"


def keeps_remainders(cfg: Mapping[str, Any]) -> bool:
    """Whether the optimizer keeps what bf16 weights round away of a step, or rounds by chance."""
    given = cfg.get("optim_args") or {}
    if isinstance(given, str):
        given = dict(part.partition("=")[::2] for part in given.replace(" ", "").split(","))
    asked = {name: str(value).lower() for name, value in given.items()} if isinstance(given, Mapping) else {}
    if str(cfg.get("optimizer")) in _EXACT:
        return asked.get("kahan_sum", "true") not in ("false", "0")
    return any(asked.get(name) in ("true", "1", "yes", "on") for name in _EXACT_IF)


def number(
    cfg: Mapping[str, Any], key: str, default: Any, least: float = 1, whole: bool = True, most: float = math.inf
) -> Any:
    """A number of the YAML; Raises PoSEError for what is none, below `least`, or above `most`."""
    value = cfg.get(key)
    if value is None:
        return default
    try:
        found = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not least <= found <= most or found == math.inf or (whole and found != int(found)):
        limit = f" and at most {int(most)}" if most < math.inf else ""
        raise PoSEError(
            f"{key}={value!r} cannot work: a {'whole ' * whole}number of at least {least:g}{limit} is needed"
        )
    return int(found) if whole else found


def block(cfg: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = cfg.get(key) or {}
    if not isinstance(value, Mapping):
        raise PoSEError(f"{key}={value!r} is no block of keys; write them indented below `{key}:`")
    return value


def unknown_keys(cfg: Mapping[str, Any]) -> list[str]:
    """A sentence for each key of a YAML that is read by nothing; none where Axolotl is not installed, or where a
    plugin that is not Axolotl's own may bring keys.

    Args:
        cfg: the values of the YAML.
    """
    plugins = cfg.get("plugins") or []
    names = [str(name) for name in plugins] if isinstance(plugins, list) else [str(plugins)]
    if any(name.partition(".")[0] not in ("pose_plugin", "axolotl") for name in names):
        return []
    known = known_keys()
    if not known:
        return []
    said = []
    for key in cfg:
        # Keys that begin with x- or a dot hold YAML anchors, by custom.
        if key in known or str(key).startswith(("x-", ".", "_")):
            continue
        close = difflib.get_close_matches(str(key), known, n=1)
        said.append(
            f"{key}={_short(cfg[key])}: Axolotl knows no such key and will drop it without a word"
            + (f". Is {close[0]} meant?" if close else "")
        )
    return said


def known_keys() -> frozenset[str]:
    """Names that the installed Axolotl's schema reads at the top level of a YAML; empty where there is none."""
    spec = importlib.util.find_spec("axolotl")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    return _read(Path(next(iter(spec.submodule_search_locations))))


@functools.cache
def _read(root: Path) -> frozenset[str]:
    schemas = root / "utils" / "schemas"
    trees = {path.name: tree for path in sorted(schemas.glob("*.py")) if (tree := _parsed(path))}
    classes = {node.name: node for tree in trees.values() for node in _classes(tree)}
    found = set(_fields("AxolotlInputConfig", classes))
    if not found:
        return frozenset()
    for name in ("config.py", "validation.py", "deprecated.py"):
        found |= set(_looked_up(trees[name])) if name in trees else set()
    # What Axolotl's own plugins add.
    for path in sorted((root / "integrations").rglob("args.py")):
        for node in _classes(tree) if (tree := _parsed(path)) else ():
            found |= set(_annotated(node)) if node.name.endswith(("Args", "Config")) else set()
    return frozenset(found) | _OWN


def _classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _fields(name: str, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """Of a class and of the classes it is made from."""
    node = classes.get(name)
    if node is None:
        return
    yield from _annotated(node)
    for base in node.bases:
        if isinstance(base, ast.Name):
            yield from _fields(base.id, classes)


def _annotated(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id
            if isinstance(part.value, ast.Call):
                # Other names of the field.
                for word in part.value.keywords:
                    if word.arg in ("alias", "validation_alias"):
                        yield from filter(None, map(_text, ast.walk(word.value)))


def _looked_up(tree: ast.Module) -> Iterator[str]:
    """Names in `data.get("…")`, `data.pop("…")`, `data["…"]` and `"…" in data`: what validators read of the YAML."""
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("get", "pop") and _is_data(node.func.value):
                name = _text(node.args[0])
        elif isinstance(node, ast.Subscript) and _is_data(node.value):
            name = _text(node.slice)
        elif isinstance(node, ast.Compare) and any(map(_is_data, node.comparators)):
            name = _text(node.left)
        if name:
            yield name


def _is_data(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "data"


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "…"
