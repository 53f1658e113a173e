"""`adapter: beacon` in the real Axolotl: what is trained, saved, resumed, loaded again, and what is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")

from tests.forked import forked
from tests.integration.axolotl_runs import base_yaml, import_axolotl, load_cfg, make_rows, train

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
    import_axolotl()
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
    import torch

    from pose_plugin.beacon import find_tuner

    ratios: list[list[int]] = []
    before: dict[str, Any] = {}

    def on_setup(model: Any, trainer: Any) -> None:
        tuner = find_tuner(model)
        plan = tuner.plan

        def watched(*args: Any, **kwargs: Any) -> list[int]:
            found = plan(*args, **kwargs)
            if tuner.training and torch.is_grad_enabled():
                ratios.append(found)
            return found

        tuner.plan = watched
        before.update({n: p.detach().clone() for n, p in model.named_parameters()})

    model, trainer = train(base_yaml(folder, **{**BEACON, **changes}), on_setup)
    history = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "eval_losses": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "ratios": ratios,
        "moved": [n for n, p in model.named_parameters() if not torch.equal(p, before[n])],
        "logits": logits_of(model),
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
    assert found["callbacks"].count("BeaconCallback") == 1
    assert "the first step that condensed left a gradient" in whole.output
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


REFUSED = {
    "an unknown key": ({"beacon": {"intervall": 16}}, "beacon.intervall is not known"),
    "a wrong value": ({"beacon": {"interval": 16, "mask": "half"}}, "beacon.mask: 'half'"),
    "no block": ({"beacon": 3}, "beacon=3 must be a block"),
    "packing": ({"sample_packing": True}, "sample_packing=True cannot go with adapter: beacon"),
    "4 bit": ({"load_in_4bit": True}, "would load the base unquantised"),
    "8 bit": ({"load_in_8bit": True}, "would load the base unquantised"),
    "merging": ({"merge_lora": True}, "cannot be merged"),
    "another adapter": ({"adapter": "lora", "lora_r": 4}, "add adapter: beacon"),
    "no adapter": ({"adapter": None}, "add adapter: beacon"),
    "reentrant": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "zero gradient",
    ),
    "offloading": ({"gradient_checkpointing": "offload"}, "has not been tried with beacons"),
    "context parallel": ({"context_parallel_size": 2}, "context_parallel_size=2 divides rows"),
    "fsdp": ({"fsdp_config": {"fsdp_version": 2}}, "Use DDP or DeepSpeed ZeRO"),
    "skips": ({"pose": {"target_length": 256}}, "pose.sampler=pose skips positions"),
    "streaming": ({"pretraining_dataset": "x"}, "no lengths to group by"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_loaded(home, name):
    from axolotl.utils.dict import DictDefault

    from pose_plugin.errors import PoSEError
    from pose_plugin.integrations.axolotl_beacon import prepare

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

    from pose_plugin.integrations.axolotl_beacon import load

    model, config = load(None, DictDefault(BEACON), config_only=True)
    assert model is None and config.interval == 16
    assert load(None, DictDefault({"adapter": "lora"})) is None


def test_an_adapter_trained_otherwise_is_refused(home, whole):
    with pytest.raises(AssertionError, match=r"beacon.interval=32, but the adapter in lora_model_dir=.* with 16"):
        run(home, "no", lora_model_dir=str(home / "whole"), beacon={"interval": 32})


EXAMPLE = Path(__file__).parents[2] / "example_configs" / "beacon" / "axolotl_beacon.yaml"


def test_the_example_fits_the_schema(home):
    """As it is, for a machine with a GPU; only the base model is a local one."""

    def case() -> tuple[list[str], Any, Any]:
        from axolotl.cli.config import prepare_plugins
        from axolotl.integrations.config import merge_input_args
        from axolotl.utils.config import validate_config
        from axolotl.utils.dict import DictDefault

        values = {**yaml.safe_load(EXAMPLE.read_text()), "base_model": str(home / "base")}
        cfg = DictDefault(values)
        prepare_plugins(cfg)
        unknown = sorted(set(values) - set(merge_input_args()[1].model_fields))
        found = validate_config(cfg).to_dict()
        return unknown, found["beacon"], found["gradient_checkpointing_kwargs"]

    assert forked(case).value == ([], yaml.safe_load(EXAMPLE.read_text())["beacon"], {"use_reentrant": False})


def test_the_example_runs(home):
    """Shrunk to the tiny base, without what a CPU cannot do."""
    values = yaml.safe_load(EXAMPLE.read_text())
    kept = ("base_model", "special_tokens", "datasets", "output_dir", "dataset_prepared_path", "bf16", "optimizer")
    changes = {key: value for key, value in values.items() if key not in kept}
    changes |= {"beacon": {**values["beacon"], "interval": 32}, "sequence_len": 128, "learning_rate": 1e-3}
    changes |= {"gradient_accumulation_steps": 1, "save_steps": None, "max_steps": 2, "logging_steps": 1}
    found = run(home, "example", **changes).value
    assert found["moved"] and len(found["losses"]) == 2
