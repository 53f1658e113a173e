"""The real Axolotl, in this process, one forked child a run: what reaches the model, what is saved, what is refused."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")

from pose_plugin.config import PoSESettings
from pose_plugin.plan.config_reader import from_values
from pose_plugin.positions import draw_windows
from pose_plugin.utils.errors import FORGOTTEN_LINE, PoSEError
from tests.forked import CaseError, Outcome, forked
from tests.integration.axolotl_runs import LORA, Run, base_yaml, load_cfg, run
from tests.integration.records import reloaded_without_us

pytestmark = pytest.mark.axolotl

TARGET = 512
WHOLE = ["embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"]
QLORA = {**LORA, "adapter": "qlora", "load_in_4bit": True}
PACKED = {"sample_packing": True, "sequence_len": 128}
EVALUATED = {"val_set_size": 0.3, "eval_steps": 1}
SKIP = {"target_length": TARGET, "rope": "yarn", "train_length": 32, "content": "skip"}

# name: (what the YAML says, documents share a row)
METHODS: dict[str, tuple[dict[str, Any], bool]] = {
    "full": (EVALUATED, False),
    "eager": ({"attn_implementation": "eager"}, False),
    "gradient checkpointing": ({"gradient_checkpointing": True}, False),
    "lora": ({**LORA, **EVALUATED}, False),
    "lora, embeddings and norms": ({**LORA, "lora_modules_to_save": WHOLE}, False),
    "qlora": (QLORA, False),
    "8 bit": ({**LORA, "load_in_8bit": True}, False),
    "padded rows": ({"pad_to_sequence_len": True, "sequence_len": 96}, False),
    "packed": (PACKED, True),
    "packed, batch of 1": ({**PACKED, "micro_batch_size": 1, "pad_to_sequence_len": True}, True),
    "packed, eager, checkpointing": (
        {**PACKED, "attn_implementation": "eager", "gradient_checkpointing": True},
        True,
    ),
    "packed qlora": ({**PACKED, **QLORA}, True),
    "packed, packed evaluation": ({**PACKED, **EVALUATED, "eval_sample_packing": True}, True),
    "packed, evaluation in rows": ({**PACKED, **EVALUATED, "eval_sample_packing": False}, True),
    "skip": ({"sequence_len": 128, "pose": SKIP}, False),
    "packed skip": ({**PACKED, "pose": SKIP}, True),
}


class Runs:
    """Every run is made once, in its own child, and looked at by several tests."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.made: dict[str, Outcome] = {}
        base_yaml(home)

    def folder(self, name: str) -> Path:
        return self.home / re.sub(r"\W+", "_", name)

    def yaml(self, name: str, **changes: Any) -> dict[str, Any]:
        folder = self.folder(name)
        paths = {"output_dir": str(folder / "out"), "dataset_prepared_path": str(folder / "prepared")}
        return base_yaml(self.home, **{**paths, **changes})

    def outcome(self, name: str, **changes: Any) -> Outcome:
        if name not in self.made:
            self.made[name] = forked(run, self.yaml(name, **changes))
        return self.made[name]

    def method(self, name: str) -> Run:
        return self.outcome(name, **METHODS[name][0]).value


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("axolotl"))


def settings(method: str) -> PoSESettings:
    changes = METHODS[method][0]
    block = {"target_length": TARGET, "rope": "linear", "train_length": changes.get("sequence_len", 64)}
    return PoSESettings(**{**block, **changes.get("pose", {})})


# -- what the model receives ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_training_batches(runs, name):
    done, packed = runs.method(name), METHODS[name][1]
    batches = done.of("train")
    assert len(batches) == len(done.losses) == 2
    assert np.isfinite(done.losses).all() and done.moved
    for batch in batches:
        assert (batch.mask is None) == packed
        assert batch.positions.shape == batch.tokens.shape and batch.positions.dtype == np.int64
        assert batch.positions.min() == 0 and batch.positions.max() < TARGET
        if not packed:
            assert batch.mask.shape == batch.tokens.shape and set(np.unique(batch.mask)) <= {0, 1}
    documents = done.documents()
    jumps = [int((np.diff(positions) > 1).sum()) for _, positions in documents]
    assert set(jumps) <= {0, 1} and sum(jumps) > len(jumps) / 2
    assert all(positions[0] == 0 for _, positions in documents)
    assert max(positions[-1] for _, positions in documents) > 2 * 128
    rows = sum(len(batch.tokens) for batch in batches)
    assert len(documents) > rows if packed else len(documents) == rows


@pytest.mark.parametrize("name", [name for name in METHODS if "skip" not in name])
def test_positions_are_those_of_the_document_itself(runs, name):
    """Neither batch, packing, padding nor method has a say."""
    for tokens, positions in runs.method(name).documents():
        window = draw_windows([np.array(tokens)], settings(name), epoch=0)[0]
        assert positions == tuple(window.position_ids)


@pytest.mark.parametrize("name", ["skip", "packed skip"])
def test_skipped_content(runs, name):
    """Windows of 32 tokens are taken from two places of a longer document, in order."""
    texts = [row.split() for row in _rows(runs.home)]
    found = 0
    for tokens, _ in runs.method(name).documents():
        assert len(tokens) <= 32
        words = [f"w{token}" for token in tokens]
        source = next(text for text in texts if _starts(text, words))
        found += words != source[: len(words)] and len(source) > 32
    assert found


def _rows(home: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (home / "rows.jsonl").read_text().splitlines()]


def _starts(text: list[str], words: list[str]) -> bool:
    left = iter([*text, "w2"])
    return all(word in left for word in words)


@pytest.mark.parametrize("name", [name for name in METHODS if "val_set_size" in METHODS[name][0]])
def test_evaluation_batches_are_plain(runs, name):
    done = runs.method(name)
    changes = METHODS[name][0]
    assert len(done.eval_losses) >= 2 and np.isfinite(done.eval_losses).all()
    for batch in done.of("eval"):
        assert (batch.mask is None) == bool(changes.get("eval_sample_packing"))
    documents = done.documents("eval")
    assert documents and all(positions == tuple(range(len(positions))) for _, positions in documents)
    if changes.get("eval_sample_packing"):
        assert len(documents) > sum(len(batch.tokens) for batch in done.of("eval"))


@pytest.mark.parametrize("name", METHODS)
def test_live_frequencies(runs, name):
    """`rope: linear` divides every frequency by 512 / 64; yarn keeps the fastest and divides the slowest."""
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    live = runs.method(name).inverse_frequencies
    if settings(name).rope.type == "linear":
        np.testing.assert_allclose(live, plain / 8, rtol=1e-6)
    else:
        assert live[0] == 1.0 and live[-1] == pytest.approx(plain[-1] / 8, rel=1e-6)


@pytest.mark.parametrize(
    "name, modules", [("qlora", {"Linear4bit"}), ("8 bit", {"Linear8bitLt"}), ("lora", {"LoraModel"})]
)
def test_adapters_are_what_they_say(runs, name, modules):
    done = runs.method(name)
    assert modules <= done.modules
    assert all("lora_" in parameter for parameter in done.moved)
    assert not {"Linear4bit", "Linear8bitLt"} & runs.method("full").modules


def test_embeddings_and_norms_are_trained_and_saved(runs):
    from safetensors.torch import load_file

    name = "lora, embeddings and norms"
    moved = runs.method(name).moved
    saved = load_file(runs.folder(name) / "out" / "adapter_model.safetensors")
    base = load_file(runs.home / "base" / "model.safetensors")
    for part in WHOLE:
        assert any(f".{part}." in parameter for parameter in moved)
        mine = {key: tensor for key, tensor in saved.items() if f"{part}.weight" in key}
        assert mine
        for key, tensor in mine.items():
            (original,) = [base[each] for each in base if key.endswith(f".{each}")]
            assert tensor.shape == original.shape and not tensor.equal(original)


def test_attention_is_what_was_asked_for(runs):
    assert runs.method("eager").attention == "eager" and runs.method("full").attention == "sdpa"


# -- one live instance ---------------------------------------------------------------------------------------------

SPELLINGS = {
    "bare": ["pose_plugin"],
    "dotted": ["pose_plugin.PosePlugin"],
    "both": ["pose_plugin.PosePlugin", "pose_plugin"],
    "twice": ["pose_plugin", "pose_plugin"],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(runs, name):
    def case(values: dict[str, Any]) -> tuple[int, int, Run]:
        done = run(values)
        from axolotl.integrations.base import PluginManager
        from axolotl.integrations.config import merge_input_args

        from pose_plugin.frameworks.axolotl import PoSEArgs, PosePlugin

        live = [p for p in PluginManager().plugins.values() if isinstance(p, PosePlugin) and p._is_live()]
        schemas = [cls.__mro__.count(PoSEArgs) for cls in merge_input_args()]
        return len({id(plugin) for plugin in live}), schemas, done

    outcome = forked(case, runs.yaml(f"spelling {name}", plugins=SPELLINGS[name]))
    live, schemas, done = outcome.value
    assert live == 1 and schemas == [1, 1]
    assert done.callbacks.count("PoSECallback") == 1
    assert outcome.output.count("[pose_plugin] rope after") == 1
    assert outcome.output.count("self-test passed") == 1
    assert done.losses == forked_losses(runs, "spelling reference", plugins=["pose_plugin"])


def forked_losses(runs: Runs, name: str, **changes: Any) -> list[float]:
    return runs.outcome(name, **changes).value.losses


def _installed(*names: str) -> None:
    """Makes Axolotl 0.21 find these installed plugins of others in place of ours; before that it looks for none."""
    from axolotl.integrations import base

    manager = base.PluginManager()
    for name in [name for name in manager.plugins if name.startswith("pose_plugin")]:
        del manager.plugins[name]
    if hasattr(base, "get_builtin_plugins"):
        found = [name for name in base.get_builtin_plugins() if not name.startswith("pose_plugin")]
        base.get_builtin_plugins = lambda: (*names, *found)


def _without_the_plugin(values: dict[str, Any]) -> Run:
    from axolotl.integrations.base import PluginManager

    _installed()
    done = run(values)
    assert not any("pose_plugin" in name for name in PluginManager().plugins)
    return done


@pytest.fixture(scope="module")
def plain(runs) -> Run:
    return forked(_without_the_plugin, runs.yaml("without", plugins=None, pose=None)).value


@pytest.mark.parametrize("plugins", [None, ["pose_plugin"], ["pose_plugin", "pose_plugin.PosePlugin"]], ids=str)
def test_without_a_block_the_plugin_is_inert(runs, plain, plugins):
    name = f"inert {plugins}"
    outcome = runs.outcome(name, plugins=plugins, pose=None)
    done = outcome.value
    assert done.losses == plain.losses
    np.testing.assert_array_equal(done.logits, plain.logits)
    assert not done.of("probe") and "PoSECallback" not in done.callbacks
    np.testing.assert_allclose(done.inverse_frequencies, 10000.0 ** (-np.arange(0, 16, 2) / 16), rtol=1e-6)
    out = runs.folder(name) / "out"
    assert not (out / "pose.json").exists()
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 64
    said = outcome.output.count("plugins names pose_plugin, but there is no `pose:` block")
    assert said == (1 if plugins else 0)


@pytest.mark.parametrize("plugins", [None, ["axolotl.integrations.liger.LigerPlugin"]])
def test_a_block_without_the_plugin_is_refused(runs, plugins):
    with pytest.raises(CaseError) as error:
        forked(load_cfg, runs.yaml("forgotten", plugins=plugins))
    assert str(error.value).startswith(f"PoSEError: {FORGOTTEN_LINE}")
    assert not runs.folder("forgotten").exists()


def test_a_broken_plugin_stops_the_run(runs):
    """Axolotl 0.19 logs an ImportError, 0.21 any error of an installed plugin, and both train on."""

    def case(values: dict[str, Any]) -> None:
        from axolotl.integrations.base import PluginManager

        for names in (sys.modules, PluginManager().plugins):
            for name in [name for name in names if name.startswith(("pose_plugin.frameworks", "pose_plugin.Pose"))]:
                del names[name]
        sys.modules["axolotl.utils.collators.batching"] = None  # type: ignore[assignment]
        load_cfg(values)

    with pytest.raises(CaseError) as error:
        forked(case, runs.yaml("broken", plugins=["pose_plugin.PosePlugin"]))
    assert str(error.value).startswith("RuntimeError: pose_plugin could not be loaded, so training would run without")


# -- the saved folder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["", "checkpoint-2"])
@pytest.mark.parametrize("name", ["full", "lora", "qlora", "packed"])
def test_saved_folder(runs, name, part):
    runs.method(name)
    folder = runs.folder(name) / "out" / part
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == TARGET
    assert "quantization_config" not in config, "a base may be loaded otherwise than it was trained on"
    # Checkpoints are for resuming, and a resume cannot read the older form.
    for key in ("rope_parameters", "rope_scaling")[: 1 if part else 2]:
        assert (config[key]["rope_type"], config[key]["factor"]) == ("linear", 8.0)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == TARGET
    record = json.loads((folder / "pose.json").read_text())
    assert record["target_length"] == TARGET and record["rope"]["type"] == "linear"
    assert PoSESettings(**{key: record[key] for key in PoSESettings.model_fields if key in record}) == settings(name)
    assert record["method"] == {"packed": "full"}.get(name, name) and record["model"]["original_length"] == 64
    assert record["base"] == {"name": "base", "revision": None}, "no path is published"
    assert record["trained"]["steps"] == 2 and record["versions"].keys() >= {"axolotl", "transformers", "torch"}
    assert record["data"] == ["rows.jsonl"]
    assert (folder / "adapter_config.json").exists() == (name in ("lora", "qlora"))


def test_saved_folders_reload_without_the_plugin(runs):
    """To the same logits, far past the base's window, in a process that has neither the plugin nor Axolotl."""
    names = ["full", "lora", "packed", "lora, embeddings and norms"]
    wanted = [runs.method(name).logits for name in names]
    folders = [runs.folder(name) / "out" / part for part in ("", "checkpoint-2") for name in names]
    for (logits, longest), want in zip(reloaded_without_us(runs.home / "base", folders), wanted * 2, strict=True):
        np.testing.assert_allclose(logits, want, atol=1e-5)
        assert longest == TARGET


@pytest.fixture
def check_here(monkeypatch) -> Any:
    """`pose-plugin check` with its reload in this process."""
    from pose_plugin.checkpoints import check, reload_worker

    monkeypatch.setattr(check, "_run_worker", lambda request, python, timeout: reload_worker.answer(request))
    return check.check_folder


@pytest.mark.parametrize("part", ["", "checkpoint-2"])
@pytest.mark.parametrize("name", ["full", "lora, embeddings and norms", "qlora", "8 bit", "packed qlora"])
def test_saved_folders_pass_the_check(runs, check_here, name, part):
    """Quantised bases are loaded as they were trained on, and answer the same."""
    runs.method(name)
    report = check_here(runs.folder(name) / "out" / part)
    assert report.passed and report.numbers["logits"] < 1e-4, str(report)


def _merge(values: dict[str, Any]) -> None:
    from axolotl.cli.merge_lora import do_cli

    file = Path(values["output_dir"]).with_name("merge.yaml")
    file.write_text(yaml.safe_dump(values))
    do_cli(config=str(file))


@pytest.mark.parametrize("method", [None, "memory_efficient", "legacy"])
@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_merged(runs, tmp_path, check_here, name, method):
    """By every method that Axolotl has, into a model that loads without the plugin to the trained one's answers."""
    runs.method(name)
    shutil.copytree(runs.folder(name) / "out", tmp_path / "out")
    values = runs.yaml(name, **METHODS[name][0], output_dir=str(tmp_path / "out"), merge_method=method)
    output = forked(_merge, {key: value for key, value in values.items() if value is not None}).output
    assert "has no `pose:` block" not in output
    merged = tmp_path / "out" / "merged"
    report = check_here(merged)
    assert report.passed, str(report)
    (sentence,) = [text for what, verdict, text in report.findings if (what, verdict) == ("logits", "ok")]
    assert ("trained on a quantised base" in sentence) is (name == "qlora")
    # Only the other method imitates the quantisation when it merges.
    exact = report.numbers.get("merge", report.numbers["logits"])
    assert exact < 1e-4 or (name == "qlora" and method != "legacy"), str(report)
    assert json.loads((merged / "pose.json").read_text())["merged"] is True
    assert (
        not (merged / "adapter_config.json").exists()
        and "a context window of 512" in (merged / "README.md").read_text()
    )


def test_merged_by_a_config_without_the_block(runs, tmp_path, check_here):
    runs.method("lora")
    shutil.copytree(runs.folder("lora") / "out", tmp_path / "out")
    values = runs.yaml("lora", **METHODS["lora"][0], output_dir=str(tmp_path / "out"))
    output = forked(_merge, {k: v for k, v in values.items() if v is not None and k not in ("plugins", "pose")}).output
    assert output.count("the config of this merge has no `pose:` block, but") == 1
    report = check_here(tmp_path / "out" / "merged")
    assert report.passed and report.numbers["logits"] < 1e-4, str(report)


# -- epochs, resuming, workers -------------------------------------------------------------------------------------

LONG = {"max_steps": 20, "save_steps": 5, "num_epochs": 3, "dataloader_num_workers": 2}


@pytest.fixture(scope="module")
def uninterrupted(runs) -> Run:
    return runs.outcome("long", **LONG).value


def _epochs(documents: list) -> list[dict]:
    """Split where the first document comes again."""
    epochs: list[dict] = [{}]
    for tokens, positions in documents:
        if tokens in epochs[-1]:
            epochs.append({})
        epochs[-1][tokens] = positions
    return epochs


def test_every_epoch_draws_anew(uninterrupted):
    first, second = _epochs(uninterrupted.documents())[:2]
    both = first.keys() & second.keys()
    assert len(both) > 5
    assert sum(first[tokens] != second[tokens] for tokens in both) > len(both) / 2
    for epoch, drawn in enumerate((first, second)):
        for tokens, positions in drawn.items():
            window = draw_windows([np.array(tokens)], settings("full"), epoch)[0]
            assert positions == tuple(window.position_ids)


@pytest.mark.parametrize("step", [5, 15], ids=["first epoch", "second epoch"])
def test_resuming_in_the_middle_of_an_epoch(runs, uninterrupted, step):
    """The rest of the run sees the same documents at the same positions, and loses the same."""
    checkpoint = runs.folder("long") / "out" / f"checkpoint-{step}"
    resumed = runs.outcome(f"resumed {step}", **LONG, resume_from_checkpoint=str(checkpoint)).value
    rest = uninterrupted.of("train")[step:]
    assert len(resumed.of("train")) == len(rest) == 20 - step
    for ours, theirs in zip(resumed.of("train"), rest, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.positions, theirs.positions)
    np.testing.assert_allclose(resumed.losses[-len(rest) :], uninterrupted.losses[step:], rtol=1e-5)
    np.testing.assert_allclose(resumed.logits, uninterrupted.logits, atol=1e-5)


@pytest.mark.parametrize("workers", [0, 4])
def test_workers_do_not_matter(runs, uninterrupted, workers):
    other = runs.outcome(f"workers {workers}", **{**LONG, "dataloader_num_workers": workers, "save_steps": 50}).value
    for ours, theirs in zip(other.of("train"), uninterrupted.of("train"), strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.positions, theirs.positions)


def test_workers_that_outlive_an_epoch(runs, uninterrupted):
    changes = {**LONG, "dataloader_num_workers": 1, "save_steps": 50, "dataloader_prefetch_factor": 2}
    persistent = forked(_persistent, runs.yaml("persistent", **changes)).value
    assert [b.positions.tolist() for b in persistent.of("train")] == [
        b.positions.tolist() for b in uninterrupted.of("train")
    ]


def _persistent(values: dict[str, Any]) -> Run:
    """Axolotl has no key for it, but transformers' argument is one of its training arguments'."""
    from axolotl.core.training_args import AxolotlTrainingArguments

    original = AxolotlTrainingArguments.__post_init__

    def post_init(self: Any) -> None:
        self.dataloader_persistent_workers = True
        original(self)

    AxolotlTrainingArguments.__post_init__ = post_init
    return run(values)


def test_packing_leaves_positions_alone(runs):
    """Documents of both runs, which train in windows of 128: the same positions."""
    rows = dict(runs.outcome("in rows", sequence_len=128, max_steps=12).value.documents())
    packed = _epochs(runs.outcome("in packs", **{**PACKED, "max_steps": 6}).value.documents())[0]
    both = rows.keys() & packed.keys()
    assert len(both) > 5
    assert all(rows[tokens] == packed[tokens] for tokens in both)


# -- refusals ------------------------------------------------------------------------------------------------------


def pose(**changes: Any) -> dict[str, Any]:
    return {"pose": {"target_length": TARGET, "rope": "linear", **changes}}


# What the settings and the rope refuse by themselves is in tests/test_config.py and tests/rope; here is one of each.
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "empty block": ({"pose": {}}, ["pose.target_length is missing", "target_length: 32768"]),
    "not a block": ({"pose": 32768}, ["`pose:` is 32768", "at least target_length"]),
    "target below the trained window": (pose(target_length=32), ["target_length=32", "sequence_len", "64"]),
    "samples longer than the target": (
        {**pose(), "sequence_len": 1024},
        ["target_length=512 is smaller than the trained window train_length=1024", "sequence_len"],
    ),
    "no chunks": (pose(chunks=0), ["pose.chunks=0", "greater than or equal to 1"]),
    "window of the whole row": (
        pose(content="skip", train_length=64),
        ["pose.content=skip has no effect", "sequence_len=64"],
    ),
    "window longer than the row": (pose(train_length=128), ["pose.train_length=128", "sequence_len=64"]),
    "streamed data": (
        {**pose(), "pretraining_dataset": [{"path": "x"}]},
        ["pretraining_dataset", "cannot be combined", "type: completion"],
    ),
    "streamed and packed": (
        {**pose(), "streaming": True, "sample_packing": True},
        ["streaming=True with sample_packing=True", "Set sample_packing: false"],
    ),
    "preferences": ({**pose(), "rl": "dpo"}, ["rl='dpo'", "supervised training first"]),
    "reward model": ({**pose(), "reward_model": True}, ["reward_model=True"]),
    "use_pose": ({**pose(), "use_pose": True}, ["use_pose=True", "pose.target_length"]),
    "built-in window": ({**pose(), "pose_max_context_len": 512}, ["pose_max_context_len=512", "Remove it"]),
    "context parallel": (
        {**pose(), "context_parallel_size": 2},
        ["context_parallel_size=2", "Set context_parallel_size: 1"],
    ),
    "sequence parallel": (
        {**pose(), "sequence_parallel_degree": 4},
        ["sequence_parallel_degree=4", "Set sequence_parallel_degree: 1"],
    ),
    "another maximum": (
        {**pose(), "overrides_of_model_config": {"max_position_embeddings": 256}},
        ["overrides_of_model_config.max_position_embeddings=256 contradicts", "512"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(runs, name):
    changes, parts = REFUSED[name]
    with pytest.raises(CaseError) as error:
        forked(load_cfg, runs.yaml(f"refused {name}", **changes))
    text = str(error.value)
    sentence = text.split("\nTraceback")[0]
    assert sentence.startswith("PoSEError: "), text
    for part in parts:
        assert part in sentence
    if "overrides_of_model_config" not in changes:
        # `pose-plugin plan` refuses it in the same words, hours before.
        with pytest.raises(PoSEError) as planned:
            from_values(runs.yaml(f"refused {name}", **changes))
        assert sentence == f"PoSEError: {planned.value}"
    # Neither outputs nor prepared data.
    assert not runs.folder(f"refused {name}").exists()


def test_agreeing_overrides_are_kept(runs):
    def case(values: dict[str, Any]) -> dict[str, Any]:
        return load_cfg(values).overrides_of_model_config.to_dict()

    wanted = {
        "max_position_embeddings": TARGET,
        "rope_scaling": {"type": "linear", "factor": 8.0},
        "attention_bias": True,
    }
    merged = forked(case, runs.yaml("agreeing", overrides_of_model_config=wanted)).value
    assert merged["attention_bias"] is True and merged["max_position_embeddings"] == TARGET
    assert merged["rope_parameters"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pose": {"target_length": 512, "train_length": 32}}, ["first pose.train_length=32", "sequence_len=64"]),
        (
            {
                "pose": {"target_length": 512, "train_length": 32, "content": "skip"},
                "sequence_len": 1024,
                "val_set_size": 0.3,
            },
            ["sequence_len=1024", "pose.target_length=512"],
        ),
        (
            {
                "eval_sequence_len": 1024,
                "test_datasets": [{"path": "rows.jsonl", "ds_type": "json", "type": "completion", "split": "train"}],
            },
            ["eval_sequence_len=1024", "pose.target_length=512"],
        ),
        (
            {
                **LORA,
                "lora_modules_to_save": ["embed_tokens"],
                "fsdp_version": 2,
                "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
            },
            ["lora_modules_to_save=['embed_tokens'] under FSDP2", "KeyError"],
        ),
    ],
    ids=["tails are not read", "evaluation beyond the target", "longer rows for evaluation", "modules under FSDP2"],
)
def test_what_is_likely_a_mistake_is_warned_about(runs, changes, words):
    output = forked(load_cfg, runs.yaml("warned", **changes)).output
    assert any(all(word in line for word in words) for line in output.splitlines()), output


def _beside_another_collator(values: dict[str, Any], first: bool) -> Run:
    """A second plugin that brings a collator of its own."""
    import types

    from axolotl.integrations.base import BasePlugin
    from axolotl.utils.collators import DataCollatorForSeq2Seq

    class Other(BasePlugin):
        def get_collator_cls_and_kwargs(self, cfg: Any, is_eval: bool = False) -> Any:
            return DataCollatorForSeq2Seq, {}

    sys.modules["another"] = types.ModuleType("another")
    sys.modules["another"].Other = Other  # type: ignore[attr-defined]
    values["plugins"] = ["another.Other", "pose_plugin"] if first else ["pose_plugin", "another.Other"]
    return run(values)


def test_another_plugins_collator_first(runs):
    def case(values: dict[str, Any]) -> Run:
        # 0.21 asks installed plugins before listed ones, in the order in which it finds them.
        _installed("another.Other", "pose_plugin.PosePlugin")
        return _beside_another_collator(values, first=True)

    with pytest.raises(CaseError) as error:
        forked(case, runs.yaml("other collator", plugins=["pose_plugin"]))
    text = str(error.value).split("\nTraceback")[0]
    assert text.startswith("PoSEError: plugins=") and "collator is DataCollatorForSeq2Seq" in text
    assert not list(runs.folder("other collator").glob("out/**/*.safetensors"))


def test_another_plugins_collator_second(runs):
    done = forked(_beside_another_collator, runs.yaml("second collator"), False).value
    assert done.losses == forked_losses(runs, "spelling reference", plugins=["pose_plugin"])
