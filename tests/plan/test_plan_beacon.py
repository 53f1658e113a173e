"""`pose-plugin plan` of a run with `adapter: beacon`: what the window holds, and what the run would refuse."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("peft")

from pose_plugin.beacon import BeaconConfig
from pose_plugin.beacon.ratios import draw, intervals
from pose_plugin.plan.beacon import _beacons
from pose_plugin.plan.config_reader import _method, from_values
from pose_plugin.plan.memory import architecture, memory
from pose_plugin.plan.plan import as_dict, make_plan
from pose_plugin.plan.report import text
from pose_plugin.rope.read import as_config
from pose_plugin.utils.errors import PoSEError
from tests.models import make_llama
from tests.plan.test_architecture import LLAMA3_8B

BASE = {"base_model": "somewhere", "plugins": ["pose_plugin"], "adapter": "beacon", "sequence_len": 65536}
RUN = {**BASE, "max_steps": 100, "bf16": True, "micro_batch_size": 1, "learning_rate": 5e-5}
BEACON = {"interval": 1024, "ratios": [8, 16, 32]}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    import json

    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text(json.dumps(LLAMA3_8B))
    return str(folder)


def plan_of(base, beacon=BEACON, **changes):
    return make_plan(from_values({**RUN, "beacon": beacon, **changes}, base), draws=20)


def test_what_a_run_holds_at_the_end_of_its_longest_text(base):
    plan = plan_of(base)
    found = as_dict(plan)["beacon"]
    # 64 intervals, of which 63 are condensed: to 32 beacons each at the largest ratio. Then 1024 tokens stay raw.
    assert (found["window"], found["intervals"], found["raw"], found["fewest"]) == (8192, 63, 1024, 63 * 32)
    # The window holds 8192: 7168 beacons and 1024 raw tokens.
    assert found["most"] == 7168
    # (8192 - 1024)·α + 1024 ≥ 65536 + 1024 of headroom: α = 16; and at 32, less the headroom.
    assert (found["reading"], found["readable"]) == (16, 7168 * 32)
    shown = text(plan)
    for piece in (
        "8192 tokens; texts of up to 65536 are read in intervals of 1024",
        "layout v1, mask stepwise, ratios 8, 16, 32, one drawn per interval",
        "65536 tokens end as 2,016 to 7,168 beacons for 63 intervals, and 1,024 raw tokens",
        "`adapt` takes ratio 16 for 65536 tokens; the longest text is 229,376 tokens, with room for 1,024 more",
    ):
        assert piece in shown
    assert "nothing is extended" not in shown and not plan.buckets and "Distances" not in shown
    kept = text(plan_of(base, {**BEACON, "sinks": 4, "overlap": 64}))
    assert "65536 tokens end as 2,016 to 7,100 beacons for 63 intervals, and 1,092 raw tokens" in kept


@pytest.mark.parametrize(("ratio", "shown"), [(8, "ratio 8 does not fit"), (16, "ratio 16 fits")])
def test_a_fixed_ratio_reads_texts(base, ratio, shown):
    plan = plan_of(base, {**BEACON, "ratio": ratio})
    assert as_dict(plan)["beacon"]["readable"] == 7168 * ratio + 1024
    assert f"{shown} 65536 tokens; the longest text is {7168 * ratio + 1024:,} tokens\n" in text(plan)


@pytest.mark.parametrize("policy", ["random", "instance"])
@pytest.mark.parametrize("layout", ["v1", "v2"])
@pytest.mark.parametrize("tokens", [1000, 3000, 5000])
def test_draws_of_the_training_stay_within_the_bounds(policy, layout, tokens):
    settings = BeaconConfig(interval=64, window=512, ratios=[2, 4, 8, 16, 32, 64], layout=layout, train_ratio=policy)
    sizes = settings.sizes(512)
    condensed, last = intervals(tokens, 64)
    fewest, most = _beacons(settings, sizes, condensed, last, tokens)
    count = condensed + sizes.interleaved
    for seed in range(20):
        chosen = draw(sizes, count, last, settings.ratios, np.random.default_rng(seed), same=policy == "instance")
        assert fewest <= sum(map(sizes.beacons, chosen[:condensed])) <= most


@pytest.mark.parametrize(
    "beacon, changes, held",
    [
        ({"interval": 1024, "train_ratio": 16, "ratios": [16]}, {}, (63 * 64, 63 * 64)),
        ({"interval": 1024, "train_ratio": "adapt", "ratios": [8, 16, 32]}, {}, (63 * 64, 63 * 64)),
        # 63 · 128 beacons of ratio 8 do not fit.
        ({"interval": 1024, "train_ratio": "instance", "ratios": [8, 16, 32]}, {}, (63 * 32, 63 * 64)),
        ({"interval": 1024, "layout": "v2", "ratios": [16, 32]}, {}, (63 * 32, 63 * 64)),
        # The window is stretched as well.
        (BEACON, {"pose": {"target_length": 131072, "rope": "yarn", "sampler": "none"}}, (63 * 32, 63 * 128)),
    ],
)
def test_ratios_layouts_and_a_stretched_window(base, beacon, changes, held):
    found = plan_of(base, beacon, **changes).beacon
    assert (found.fewest, found.most) == held
    assert found.window == (131072 if changes else 8192)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"beacon": {"intervall": 512}}, "beacon.intervall is not known .did you mean interval"),
        ({"beacon": {"interval": 1024, "ratios": [3]}}, "beacon.ratios: 3 must be a whole number"),
        ({"beacon": True}, "beacon=True must be a block of settings"),
        ({"beacon": {"interval": 8192}}, "beacon.interval: 8192 leaves no room for memory in window 8192"),
        (
            {"beacon": {"target_modules": ["q_proj"]}},
            "beacon.target_modules=.* add k_proj and v_proj",
        ),
        ({"pose": [1]}, r"pose=\[1\] is not a block of keys"),
        ({"gradient_checkpointing_kwargs": [1]}, r"gradient_checkpointing_kwargs=\[1\] is not a block"),
        ({"context_parallel_size": "many"}, "context_parallel_size=many"),
        ({"context_parallel_size": 2}, "context_parallel_size=2"),
        ({"sequence_len": 10**11}, "sequence_len=100000000000 cannot work: .* at most 2147483647"),
        ({"beacon": {"window": 9000}}, "beacon.window: 9000 is more than max_position_embeddings, 8192"),
        ({"sample_packing": True}, "sample_packing=True .*adapter: beacon"),
        ({"load_in_8bit": True}, "load_in_8bit=True .*adapter: beacon"),
        ({"fsdp_config": {"reshard_after_forward": True}}, "fsdp_config=.* .*adapter: beacon"),
        ({"gradient_checkpointing": "offload"}, "gradient_checkpointing='offload'"),
        ({"pose": {"target_length": 16384}}, "pose.sampler=pose"),
        ({"adapter": "lora", "beacon": {"interval": 64}}, "adapter='lora'"),
        ({"adapter": None, "beacon": {"interval": 64}}, "adapter=None"),
    ],
)
def test_what_the_run_refuses_the_plan_refuses(base, changes, message):
    with pytest.raises(PoSEError, match=message):
        plan_of(base, **changes)


def test_without_peft_only_memory_is_planned(base, monkeypatch):
    def missing(name, *args, **kwargs):
        if name.startswith(("pose_plugin.beacon", "pose_plugin.frameworks.axolotl_beacon")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    real = __builtins__["__import__"]
    monkeypatch.setitem(__builtins__, "__import__", missing)
    plan = plan_of(base, {"intervall": 5})
    monkeypatch.undo()
    assert plan.beacon is None and plan.memory.trained_parameters > 0
    assert any("PEFT is missing" in note for note in plan.inputs.notes)
    assert "texts of up to 65536 tokens are read in intervals" in text(plan)


def test_the_yaml_is_left_as_it_is(base):
    given = {**RUN, "beacon": dict(BEACON), "load_in_4bit": True, "gradient_checkpointing": True}
    before = {key: dict(value) if isinstance(value, dict) else value for key, value in given.items()}
    assert from_values(given, base).run.quantised == "nf4" and given == before


@pytest.mark.parametrize(
    "changes, message",
    [
        # 300 intervals of 32 beacons are more than the window.
        (
            {"sequence_len": 307200},
            r"sequence_len=307200 tokens will stop the training: training text too long.* a larger window\. A smaller",
        ),
        ({"sequence_len": 1024}, "nothing is trained, and the run stops before the first step"),
        ({"max_steps": None}, "the number of steps is not known"),
        ({}, "bf16=True keeps the trained weights in bf16.*learning_rate=5e-05.*above 0.026.*`dtype: float32` in the"),
    ],
)
def test_warnings(base, changes, message):
    import re

    warnings = plan_of(base, **changes).warnings
    assert any(re.search(message, each) for each in warnings), warnings
    assert len(warnings) == len(set(warnings))


def test_a_run_that_loses_nothing_has_no_warnings(base):
    assert plan_of(base, {**BEACON, "dtype": "float32"}).warnings == []
    assert plan_of(base, deepspeed={"zero_optimization": {"stage": 2}}).warnings == []
    assert plan_of(base, bf16=False).warnings == []


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "beacon",
    [
        {},
        {"rank": 4},
        {"target_modules": ["q_proj", "k_proj", "v_proj", "up_proj"]},
        {"target_modules": r".*\.1\..*[kv]_proj"},
    ],
)
def test_trained_parameters_are_those_of_the_real_adapter(family, beacon):
    from peft import get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    made = make_llama().config.to_dict()
    config = AutoConfig.for_model(family, **{k: v for k, v in made.items() if k not in ("model_type", "architectures")})
    model = get_peft_model(AutoModelForCausalLM.from_config(config), BeaconConfig(interval=8, window=32, **beacon))
    real = sum(p.numel() for p in model.parameters() if p.requires_grad)
    run = _method({**RUN, "beacon": {"interval": 8, **beacon}}, [])
    assert memory(architecture(as_config(config.to_dict())), run).trained_parameters == real
