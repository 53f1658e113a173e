"""The commands themselves, each in a process of its own, as a user types them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")

import yaml

from pose_plugin.utils.errors import PoSEError
from tests.forked import LIMIT, forked
from tests.integration.axolotl_runs import LORA, base_yaml, run

pytestmark = pytest.mark.axolotl

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PLUGINS = ["pose_plugin", "tests.integration.recorder.Recorder"]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    base_yaml(folder)
    return folder


def write(home: Path, name: str, **changes: Any) -> Path:
    values = base_yaml(
        home,
        **{
            "plugins": PLUGINS,
            "output_dir": str(home / name / "out"),
            "dataset_prepared_path": str(home / name / "prepared"),
            # Workers would be two more processes that import everything.
            "dataloader_num_workers": 0,
            **changes,
        },
    )
    path = home / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def command(home: Path, *parts: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [str(BIN / parts[0]), *parts[1:]],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=home,
        env={**os.environ, "PYTHONPATH": paths, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **environment},
    )


def good(home: Path, *parts: str, **environment: str) -> str:
    done = command(home, *parts, **environment)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-5000:]
    return output


def recorded(path: Path) -> dict[tuple[int, ...], tuple[int, ...]]:
    """tokens → positions of every document that a process trained on."""
    batches = [json.loads(line) for line in path.read_text().splitlines()]
    return {tuple(tokens): tuple(positions) for batch in batches for tokens, positions in batch}


def test_preprocess_train_merge(home):
    """LoRA from the bare YAML to a merged model."""
    config = str(write(home, "lora", **LORA, plugins=PLUGINS))
    good(home, "axolotl", "preprocess", config)
    assert list((home / "lora" / "prepared").glob("**/*.arrow"))

    record = home / "lora.record"
    output = good(home, "axolotl", "train", config, "--launcher", "python", POSE_TEST_RECORD=str(record))
    assert "[pose_plugin] self-test passed" in output
    documents = recorded(Path(f"{record}.0"))
    assert len(documents) == 4 and max(positions[-1] for positions in documents.values()) > 64
    out = home / "lora" / "out"
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 512

    good(home, "axolotl", "merge-lora", config)
    merged = json.loads((out / "merged" / "config.json").read_text())
    assert merged["max_position_embeddings"] == 512
    for key in ("rope_parameters", "rope_scaling"):
        assert (merged[key]["rope_type"], merged[key]["factor"]) == ("linear", 8.0)
    assert json.loads((out / "merged" / "tokenizer_config.json").read_text())["model_max_length"] == 512
    assert json.loads((out / "merged" / "pose.json").read_text())["target_length"] == 512
    assert not (out / "merged" / "adapter_config.json").exists()
    assert list((out / "merged").glob("*.safetensors"))
    assert f"{out / 'merged'}: passed" in good(home, "pose-plugin", "check", str(out / "merged"))


# The YAML's target is 512; the command line raises it, in both ways to write an option.
OVERRIDES = ["--pose.target_length", "1024", "--pose.rope.type=yarn"]
LAUNCHERS = {
    "accelerate": [
        *("accelerate", "launch", "--config_file", str(ROOT / "example_configs" / "accelerate" / "ddp.yaml")),
        *("--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0"),
        *("-m", "axolotl.cli.train", "CONFIG", *OVERRIDES),
    ],
    "torchrun": [
        *("axolotl", "train", "CONFIG", *OVERRIDES),
        *("--launcher", "torchrun", "--", "--nproc_per_node=2", "--standalone"),
    ],
}


@pytest.fixture(scope="module")
def alone(home):
    """tokens → positions of an epoch in one process, with the overrides in the YAML."""
    block = {"target_length": 1024, "rope": "yarn"}
    return dict(
        forked(run, base_yaml(home, pose=block, max_steps=12, output_dir=str(home / "alone"))).value.documents()
    )


@pytest.mark.parametrize("launcher", [pytest.param("accelerate", marks=pytest.mark.once), "torchrun"])
def test_two_processes_on_a_cpu_draw_what_one_draws(home, alone, launcher):
    """By the documented lines, without any key for the CPU; options after them override the YAML."""
    config, record = write(home, launcher, micro_batch_size=1), home / f"{launcher}.record"
    line = [str(config) if word == "CONFIG" else word for word in LAUNCHERS[launcher]]
    output = good(home, *line, POSE_TEST_RECORD=str(record))
    # Logged once, though both ranks take part.
    assert output.count("[pose_plugin] self-test passed") == 1
    ranks = [recorded(Path(f"{record}.{rank}")) for rank in (0, 1)]
    assert all(len(rank) == 2 for rank in ranks)
    assert not ranks[0].keys() & ranks[1].keys()
    assert (ranks[0] | ranks[1]).items() <= alone.items()
    assert len(alone) == 24 and max(positions[-1] for positions in alone.values()) > 512
    out = home / launcher / "out"
    assert json.loads((out / "pose.json").read_text())["target_length"] == 1024
    rope = json.loads((out / "config.json").read_text())["rope_scaling"]
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 16.0)


# What an option means, however Axolotl and python-fire hand it over.
PASSED_ON = {
    "a number": (["--pose.target_length", "1024"], {"target_length": 1024, "rope": "linear"}),
    "python-fire's dashes": (["--pose.target-length=1024"], {"target_length": 1024, "rope": "linear"}),
    "nested": (
        ["--pose.rope.type", "base", "--pose.rope.theta", "2.0e8"],
        {"target_length": 512, "rope": {"type": "base", "theta": 2.0e8}},
    ),
    "a block": (["--pose", "{target_length: 1024, self_test: no}"], {"target_length": 1024, "self_test": False}),
    "a switch": (["--pose.mask_seam", "no"], {"target_length": 512, "rope": "linear", "mask_seam": False}),
}


@pytest.mark.parametrize("name", PASSED_ON)
def test_options_reach_the_block(home, name):
    """By Axolotl's command in this process, and by the process that its launcher starts."""
    options, block = PASSED_ON[name]
    config = str(write(home, "options"))
    assert forked(by_the_command, config, options).value == block
    if name != "a block":
        # What `accelerate launch -m axolotl.cli.train` makes of the options.
        assert forked(by_fire, config, options).value == block


def by_the_command(config, options):
    from axolotl.cli import config as module
    from axolotl.cli import main

    found = {}
    main.launch_training = lambda *given: found.update(options=given[3], rest=given[4])
    main.cli.main(["train", config, *options, "--launcher", "torchrun", "--", "--nnodes=2"], standalone_mode=False)
    assert found["rest"] == ["--nnodes=2"]
    return plain_block(module, config, found["options"])


def by_fire(config, options):
    import fire
    from axolotl.cli import config as module

    return plain_block(module, config, fire.Fire(lambda **given: given, options))


def plain_block(module, config, options):
    """Return the `pose:` block that the plugin reads."""
    from pose_plugin.frameworks.axolotl_settings import plain

    module.validate_config = stop = StopHere()
    try:
        module.load_cfg(config, **options)
    except StopIteration:
        return plain(stop.cfg["pose"])


class StopHere:
    """In place of Axolotl's validation, which comes right after the plugins."""

    def __call__(self, cfg, **kwargs):
        self.cfg = cfg
        raise StopIteration


def test_an_option_is_refused_if_the_hook_is_off(monkeypatch):
    from axolotl.cli import plugins

    from pose_plugin.frameworks.axolotl_overrides import apply_overrides

    monkeypatch.setattr(plugins.PluginCommandGroup, "get_command", plugins.PluginCommandGroup.resolve_command)
    monkeypatch.setattr("sys.argv", ["axolotl", "train", "config.yaml", "--pose.target_length=1024"])
    with pytest.raises(PoSEError, match=r"--pose\.target_length=1024"):
        apply_overrides({"pose": {"target_length": 512}})


def test_a_beacon_option_reaches_its_block():
    from pose_plugin.frameworks.axolotl_overrides import apply_overrides

    cfg = {"beacon": {"interval": 1024}, "beacon.interval": "64", "beacon.ratios": "[2, 4]", "sequence_len": 64}
    apply_overrides(cfg)
    assert cfg == {"beacon": {"interval": 64, "ratios": [2, 4]}, "sequence_len": 64}
    for broken in ({"beacon.ratios": "[2, 4"}, {"beacon": "{interval: 64"}):
        (name, text), *_ = broken.items()
        with pytest.raises(PoSEError, match=re.escape(f"--{name} {text}: the value is not valid YAML")):
            apply_overrides(broken)


END = """
import sys, time
from axolotl.telemetry.manager import TelemetryManager
from posthog.consumer import Consumer
from pose_plugin.frameworks.axolotl_machine import end_without_network
Consumer.request = {"away": lambda self, batch: time.sleep(1e6), "there": lambda self, batch: None}[sys.argv[1]]
for event in ("config-loaded", "train-end"):
    TelemetryManager.get_instance().send_event(event)
    end_without_network()
"""


@pytest.mark.parametrize("network", ["there", "away"])
def test_a_run_ends_without_a_network(network):
    """Axolotl's own exit waits forever for messages that nobody sends any more."""
    variables = {**os.environ, "AXOLOTL_DO_NOT_TRACK": "0", "DO_NOT_TRACK": "0"}
    command = [sys.executable, "-c", END, network]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)
    assert done.returncode == 0, done.stderr
    assert ("AXOLOTL_DO_NOT_TRACK=1" in done.stderr + done.stdout) == (network == "away")


def test_a_refusal_is_the_last_thing_on_the_screen(home):
    """One sentence at the end, no file written, and no waiting for a network that never answers."""
    config = write(home, "refused", plugins=["tests.integration.recorder.NoNetwork", "pose_plugin"])
    done = command(
        home, "axolotl", "train", str(config), "--launcher", "python", "--pose.target_len", "1024",
        AXOLOTL_DO_NOT_TRACK="0", DO_NOT_TRACK="0",
    )  # fmt: skip
    assert done.returncode != 0
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("pose_plugin.utils.errors.PoSEError: pose.target_len=1024 is not a known key")
    assert not (home / "refused").exists()
