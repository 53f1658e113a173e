"""`adapter: beacon` in the real Axolotl: what is trained, saved, resumed, loaded again, and what is refused."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")

from pose_plugin.checkpoints.saved import RECORD
from tests.forked import forked, good_ranks
from tests.integration import distributed
from tests.integration.axolotl_runs import base_yaml, in_this_process, load_cfg, make_rows, train
from tests.integration.records import layer_kinds, moved, watch_draws, weights_of

pytestmark = pytest.mark.axolotl

# Texts of 60 to 118 words; intervals of 16 in a window of 64.
BEACON = {
    "adapter": "beacon",
    "beacon": {"interval": 16, "ratios": [2, 4, 8], "headroom": 0},
    "pose": None,
    "sequence_len": 128,
    "max_steps": 4,
    "save_steps": 2,
    "seed": 7,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("beacon")
    make_rows(folder / "rows.jsonl", low=60, high=118)
    base_yaml(folder)
    return folder


def logits_of(model: Any) -> list[float]:
    import torch

    was = model.training
    model.eval()
    with torch.no_grad():
        found = model(input_ids=torch.arange(20, 120)[None], use_cache=False).logits[0, -1].tolist()
    model.train(was)
    return found


def learn(folder: Path, **changes: Any) -> dict[str, Any]:
    """Trains, and says what a rank of the run would see."""
    from pose_plugin.beacon import find_tuner

    seen: dict[str, Any] = {}
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        distributed.on_cpu("ddp")
        changes |= {"micro_batch_size": 2 // world}

    def on_setup(model: Any, trainer: Any) -> None:
        seen.update(drawn=watch_draws(find_tuner(model)), before=weights_of(model))

    model, trainer = train(base_yaml(folder, **{**BEACON, **changes}), on_setup)
    history = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "eval_losses": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "ratios": [ratios for _, ratios in seen["drawn"]],
        "lengths": [tokens for tokens, _ in seen["drawn"]],
        "world": trainer.args.world_size,
        "kinds": layer_kinds(model),
        "moved": moved(model, seen["before"]),
        # bitsandbytes' layers on CPU cannot leave training mode.
        "logits": [] if getattr(model, "is_loaded_in_4bit", False) else logits_of(model),
        "max": find_tuner(model).window.size,
        "dtype": str(find_tuner(model).embedding.row().dtype),
        "callbacks": [type(callback).__name__ for callback in trainer.callback_handler.callbacks],
    }


def run(folder: Path, out: str, **changes: Any) -> Any:
    return forked(functools.partial(learn, folder, output_dir=str(folder / out), **changes))


def reloaded(folder: Path, out: str) -> list[float]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    return logits_of(PeftModel.from_pretrained(base, folder / out))


@pytest.fixture(scope="module")
def whole(home) -> Any:
    return run(home, "whole")


def test_a_run_trains_beacons_and_nothing_else(whole):
    found = whole.value
    assert found["moved"] and all("beacon_" in name for name in found["moved"])
    assert any("beacon_embedding" in name for name in found["moved"])
    assert [found["callbacks"].count(name) for name in ("BeaconCallback", "LostSteps")] == [1, 1]
    assert "the first step with a label behind a beacon left a gradient" in whole.output
    # Axolotl raises the model's window to sequence_len, 128 here, where it is shorter.
    assert found["max"] == 64 and "the window stays 64" in whole.output
    assert len({tuple(each) for each in found["ratios"]}) > 1  # drawn anew for each step


def test_what_is_saved_loads_and_answers_alike(home, whole):
    from safetensors import safe_open

    with safe_open(home / "whole" / "adapter_model.safetensors", "pt") as file:
        assert all("beacon_" in name for name in file.keys())  # noqa: SIM118 - not a dict
    saved = json.loads((home / "whole" / "adapter_config.json").read_text())
    assert (saved["peft_type"], saved["interval"], saved["ratios"]) == ("POSE_PLUGIN_BEACON", 16, [2, 4, 8])
    # In a child that has not imported pose_plugin.beacon before PEFT reads the type.
    assert forked(reloaded, home, "whole").value == pytest.approx(whole.value["logits"], abs=1e-5)


def test_a_resumed_run_draws_and_learns_what_the_first_did(home, whole):
    checkpoint = str(home / "whole" / "checkpoint-2")
    again = run(home, "again", resume_from_checkpoint=checkpoint).value
    assert again["ratios"] == whole.value["ratios"][2:]
    assert again["losses"][-2:] == pytest.approx(whole.value["losses"][-2:], abs=1e-4)
    assert again["logits"] == pytest.approx(whole.value["logits"], abs=1e-4)


def test_an_adapter_goes_on_from_lora_model_dir_with_checkpointing_and_evaluation(home, whole):
    more = run(
        home,
        "more",
        lora_model_dir=str(home / "whole"),
        beacon={"interval": 16},
        gradient_checkpointing=True,
        val_set_size=0.2,
        eval_steps=2,
    ).value
    assert more["losses"][0] < whole.value["losses"][0]
    assert more["eval_losses"] and more["moved"]


def evaluate(folder: Path, out: str, **changes: Any) -> dict[str, float]:
    """`axolotl evaluate` in this process."""
    from axolotl.common.datasets import load_datasets
    from axolotl.evaluate import evaluate as measured

    in_this_process()
    cfg = load_cfg(base_yaml(folder, **{**BEACON, "val_set_size": 0.2, "output_dir": str(folder / out), **changes}))
    return measured(cfg=cfg, dataset_meta=load_datasets(cfg=cfg))


def test_evaluate_measures_a_trained_adapter_or_none(home, whole):
    with pytest.raises(AssertionError, match=r"lora_model_dir=None: .*--lora-model-dir .*/judged"):
        forked(evaluate, home, "judged")
    assert not (home / "judged" / "eval_summary.csv").exists()
    trained = functools.partial(evaluate, home, "judged", lora_model_dir=str(home / "whole"))
    assert forked(trained).value["eval_loss"] > 0


def test_only_untrained_models_are_refused_or_named(caplog, tmp_path):
    """Not what is loaded, or what this run trains; LoRA's new adapter, which changes nothing yet, is only named."""
    from pose_plugin.frameworks.axolotl_evaluate import WatchUntrained
    from pose_plugin.utils.errors import PoSEError

    def predicts(trains: bool = False, **cfg: Any) -> str:
        watch, state = WatchUntrained({"output_dir": "out", **cfg}), SimpleNamespace(is_world_process_zero=True)
        caplog.clear()
        if trains:
            watch.on_train_begin(None, state, None)
        for _ in range(2):
            watch.on_prediction_step(None, state, None)
        return "\n".join(caplog.messages)

    with pytest.raises(PoSEError, match=r"lora_model_dir=None: the adapter \(beacon\).*--lora-model-dir out"):
        predicts(adapter="beacon")
    assert predicts(adapter="lora").count("lora_model_dir=None: a new, untrained adapter (lora) is measured") == 1
    trained = {"base_model": "base", "output_dir": str(tmp_path)}
    assert predicts(**trained) == ""
    (tmp_path / RECORD).write_text('{"target_length": 256}')
    assert predicts(**trained).endswith(f"add --base-model {tmp_path}")
    loaded = {**trained, "base_model": f"{tmp_path}/."}
    for fine in (
        {},
        loaded,
        {**trained, "trains": True},
        {"adapter": "beacon", "trains": True},
        {"adapter": "lora", "lora_model_dir": "out"},
    ):
        assert predicts(**fine) == ""


def test_rope_and_beacons_together(home):
    """The paper's Appendix C: the window is stretched as well."""
    both = run(
        home,
        "both",
        pose={"target_length": 256, "rope": "yarn", "sampler": "none"},
        max_steps=2,
    ).value
    assert both["max"] == 256 and all("beacon_" in name for name in both["moved"])
    saved = json.loads((home / "both" / "config.json").read_text())
    assert saved["max_position_embeddings"] == 256 and saved["rope_parameters"]["rope_type"] == "yarn"


@pytest.fixture(scope="module")
def two_lengths(home) -> dict[str, Any]:
    """Texts of 4 and of 7 intervals, which Axolotl pads to 64 and 128 tokens. The padding is not read."""
    short, long = (make_rows(home / f"{n}.jsonl", low=n, high=n + 1).read_text().splitlines() for n in (50, 100))
    mixed = [row for pair in zip(short[:12], long[:12], strict=True) for row in pair]
    (home / "mixed.jsonl").write_text("\n".join(mixed) + "\n")
    data = [{"path": str(home / "mixed.jsonl"), "ds_type": "json", "type": "completion", "field": "text"}]
    return {"datasets": data, "dataset_prepared_path": str(home / "mixed"), "save_steps": None, "max_steps": 6}


def test_two_ranks_draw_and_learn_what_one_process_does(home, two_lengths):
    alone = run(home, "alone", **two_lengths).value
    assert set(alone["lengths"]) == {51, 101}
    case = functools.partial(learn, home, output_dir=str(home / "both_ranks"), **two_lengths)
    environment = distributed.environment(distributed.Case("axolotl", "ddp", "lora"))
    both = [outcome.value for outcome in good_ranks(case, **environment)]
    assert [each["world"] for each in both] == [2, 2]
    for each in both:
        assert each["ratios"] == alone["ratios"] and each["lengths"] == alone["lengths"]
        assert each["losses"] == pytest.approx(alone["losses"], abs=2e-4)
        assert each["moved"] == alone["moved"]
    assert both[0]["logits"] == pytest.approx(both[1]["logits"], abs=1e-5)
    assert both[0]["logits"] == pytest.approx(alone["logits"], abs=2e-4)


def test_a_four_bit_base(home):
    """Axolotl quantises for its own adapters only; here transformers is told."""
    pytest.importorskip("bitsandbytes")
    found = run(home, "four", load_in_4bit=True, gradient_checkpointing=True, save_steps=None)
    assert found.value["kinds"] == ["Linear4bit"]
    assert found.value["moved"] and all("beacon_" in name for name in found.value["moved"])
    assert len(found.value["losses"]) == 4
    assert "the base is loaded in 4 bits" in found.output


REFUSED = {
    "an unknown key": ({"beacon": {"intervall": 16}}, "beacon.intervall is not known"),
    "packing": ({"sample_packing": True}, "sample_packing=True"),
    "flattening": ({"batch_flattening": "auto"}, "batch_flattening='auto'"),
    "a kernel": ({"lora_mlp_kernel": True}, "lora_mlp_kernel=True"),
    "8 bit": ({"load_in_8bit": True}, "load_in_8bit=True"),
    "merging": ({"merge_lora": True}, "merge_lora=True"),
    "another adapter": ({"adapter": "lora", "lora_r": 4}, "adapter='lora'"),
    "no adapter": ({"adapter": None}, "adapter=None"),
    "reentrant": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "use_reentrant=True",
    ),
    "no such block": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": [1]},
        r"gradient_checkpointing_kwargs=\[1\]",
    ),
    "context parallel": ({"context_parallel_size": 2}, "context_parallel_size=2"),
    "fsdp": ({"fsdp_config": {"fsdp_version": 2}}, "fsdp_config="),
    "skips": ({"pose": {"target_length": 256}}, "pose.sampler=pose"),
    "streaming": ({"pretraining_dataset": "x"}, "pretraining_dataset='x'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_loaded(home, name):
    from axolotl.utils.dict import DictDefault

    from pose_plugin.frameworks.axolotl_beacon import prepare
    from pose_plugin.utils.errors import PoSEError

    changes, message = REFUSED[name]
    values = base_yaml(home, **{**BEACON, **changes})
    with pytest.raises(PoSEError, match=message):
        prepare(DictDefault(values))


def test_a_refusal_ends_the_command(home):
    def case() -> str:
        try:
            load_cfg(base_yaml(home, **{**BEACON, "sample_packing": True}))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    assert forked(case).value.startswith("PoSEError: sample_packing=True")


def test_config_only_and_other_adapters(home):
    from axolotl.utils.dict import DictDefault

    from pose_plugin.frameworks.axolotl_beacon import load
    from pose_plugin.utils.errors import PoSEError

    model, config = load(None, DictDefault(BEACON), config_only=True)
    assert model is None and config.interval == 16
    with pytest.raises(PoSEError, match=r"lora_model_dir=None.*--lora-model-dir out"):
        load(None, DictDefault({**BEACON, "output_dir": "out"}), inference=True)
    assert load(None, DictDefault({"adapter": "lora"})) is None


DTYPES = ({}, {"bf16": "auto"}, {"bf16": True}, {"bf16": False}, {"fp16": True}, {"fp16": False}, {"bf16": None})
DTYPES += ({"bf16": False, "fp16": True}, {"bf16": None, "bfloat16": True}, {"bf16": False, "float16": True})


@pytest.mark.parametrize("able", [True, False])
@pytest.mark.parametrize("asked", DTYPES, ids=str)
def test_a_four_bit_base_computes_as_the_run_does(monkeypatch, asked, able):
    """Axolotl's default, bf16: auto, is not in the YAML."""
    import transformers.utils
    from axolotl.utils import config
    from axolotl.utils.dict import DictDefault

    from pose_plugin.frameworks.axolotl_beacon import prepare

    for module in (config, transformers.utils):
        monkeypatch.setattr(module, "is_torch_bf16_gpu_available", lambda: able)
    ours = DictDefault({**BEACON, **asked, "load_in_4bit": True})
    prepare(ours)
    theirs = DictDefault({"bf16": "auto", **asked})
    config.resolve_dtype(theirs)
    found = ours["overrides_of_model_kwargs"]["quantization_config"]["bnb_4bit_compute_dtype"]
    assert f"torch.{found}" == str(theirs.torch_dtype)


def test_keys_of_lora_are_named(home):
    given = {**BEACON, "lora_r": 8, "lora_dropout": 0.0, "peft_use_dora": True, "lora_model_dir": "x"}

    def case() -> None:
        load_cfg(base_yaml(home, **given))

    sentence = "lora_r, peft_use_dora: no effect with adapter: beacon"
    assert sentence in forked(case).output

    from pose_plugin.plan.config_reader import from_yaml

    (home / "with_lora.yaml").write_text(yaml.safe_dump(base_yaml(home, **given)))
    assert any(each.startswith(sentence) for each in from_yaml(home / "with_lora.yaml").warnings)


def test_an_adapter_trained_otherwise_is_refused(home, whole):
    with pytest.raises(AssertionError, match=r"beacon.interval=32, but the adapter in lora_model_dir=.* with 16"):
        run(home, "no", lora_model_dir=str(home / "whole"), beacon={"interval": 32})


EXAMPLE = distributed.CONFIGS / "beacon" / "axolotl_beacon.yaml"
QUICK = EXAMPLE.with_name("quickstart.yaml")
PUBLISHED = EXAMPLE.with_name("llama2-7b-chat.yaml")


@pytest.mark.parametrize("path", [EXAMPLE, QUICK, PUBLISHED], ids=lambda path: path.stem)
def test_an_example_fits_the_schema(home, path):
    """As it is, the first for a machine with a GPU; only the base model is a local one."""
    given = yaml.safe_load(path.read_text())

    def case() -> tuple[list[str], Any, Any]:
        from axolotl.cli.config import prepare_plugins
        from axolotl.integrations.config import merge_input_args
        from axolotl.utils.config import validate_config
        from axolotl.utils.dict import DictDefault

        values = {**given, "base_model": str(home / "base")}
        cfg = DictDefault(values)
        prepare_plugins(cfg)
        unknown = sorted(set(values) - set(merge_input_args()[1].model_fields))
        found = validate_config(cfg).to_dict()
        return unknown, found["beacon"], found.get("gradient_checkpointing_kwargs")

    checkpointing = {"use_reentrant": False} if given.get("gradient_checkpointing") else None
    assert forked(case).value == ([], given["beacon"], checkpointing)


def test_the_example_runs(home):
    """Shrunk to the tiny base, without what a CPU cannot do."""
    values = yaml.safe_load(EXAMPLE.read_text())
    kept = ("base_model", "special_tokens", "datasets", "output_dir", "dataset_prepared_path", "bf16", "optimizer")
    changes = {key: value for key, value in values.items() if key not in kept}
    changes |= {
        "beacon": {**values["beacon"], "interval": 32, "headroom": 0},
        "sequence_len": 128,
        "learning_rate": 1e-3,
    }
    changes |= {"gradient_accumulation_steps": 1, "save_steps": None, "max_steps": 2, "logging_steps": 1}
    found = run(home, "example", **changes).value
    assert found["moved"] and len(found["losses"]) == 2


def test_the_quick_start_trains(home):
    """Two steps on rows of its own script, with the real base; benchmarks/beacon_learning.py runs all of it."""

    def write() -> None:
        import random
        import sys

        from transformers import AutoTokenizer

        sys.path.insert(0, str(QUICK.parent))
        from quickstart_data import FactDocuments, row

        documents = FactDocuments(AutoTokenizer.from_pretrained(distributed.CONFIGS / "quickstart" / "base"))
        rng = random.Random(0)
        rows = [row(*documents.draw(192, (8, 50), rng)) for _ in range(32)]
        (home / "facts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))

    forked(write)
    values = yaml.safe_load(QUICK.read_text())
    values |= {"base_model": str(distributed.CONFIGS.parent / values["base_model"]), "special_tokens": None}
    del values["output_dir"]
    values["datasets"][0]["path"] = str(home / "facts.jsonl")
    values |= {"dataset_prepared_path": str(home / "facts"), "logging_steps": 1}
    found = run(home, "quick", **{**values, "max_steps": 2, "save_steps": None}).value
    assert len(found["losses"]) == 2 and 1 < found["losses"][0] < 3  # nothing but digits has a label
    assert found["lengths"] == [192, 192] and found["max"] == 128
    assert found["moved"] and all("beacon_" in name for name in found["moved"])
