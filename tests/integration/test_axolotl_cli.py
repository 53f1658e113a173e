"""The commands themselves, each in a process of its own, as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")

import yaml

from tests.forked import LIMIT
from tests.integration.axolotl_runs import LORA, base_yaml

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


def test_one_process_and_two_draw_the_same(home):
    """One process trains an epoch; what two ranks see of it stands at the same positions."""
    one, two = home / "one.record", home / "two.record"
    config = write(home, "one", max_steps=12)
    output = good(
        home, "accelerate", "launch", "--cpu", "--num_processes", "1", "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", "-m", "axolotl.cli.train", str(config),
        POSE_TEST_RECORD=str(one),
    )  # fmt: skip
    assert output.count("[pose_plugin] self-test passed") == 1
    alone = recorded(Path(f"{one}.0"))
    assert len(alone) == 24

    config = write(home, "two", micro_batch_size=1)
    output = good(
        home, "axolotl", "train", str(config), "--launcher", "torchrun",
        "--", "--nproc_per_node=2", "--standalone",
        POSE_TEST_RECORD=str(two), ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    # Said once, though both ranks take part.
    assert output.count("[pose_plugin] self-test passed") == 1
    ranks = [recorded(Path(f"{two}.{rank}")) for rank in (0, 1)]
    assert all(len(rank) == 2 for rank in ranks)
    assert not ranks[0].keys() & ranks[1].keys()
    assert (ranks[0] | ranks[1]).items() <= alone.items()
    out = home / "two" / "out"
    assert json.loads((out / "pose.json").read_text())["target_length"] == 512
    assert json.loads((out / "config.json").read_text())["rope_scaling"]["factor"] == 8.0


def test_a_refusal_is_the_last_thing_on_the_screen(home):
    """One sentence at the end, whatever Axolotl prints before it, and no file written."""
    config = write(home, "refused", pose={"target_len": 512})
    done = command(home, "axolotl", "train", str(config), "--launcher", "python")
    assert done.returncode != 0
    lines = done.stderr.rstrip().splitlines()[-2:]
    assert lines[0].startswith("pose_plugin.utils.errors.PoSEError: pose.target_length is missing")
    assert lines[1].startswith("pose.target_len=512 is not a known key. Known keys: target_length, train_length")
    assert not (home / "refused").exists()
