"""`pose-plugin doctor` names the cause of each reported folder, and repairs it where the repair is certain."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pose_plugin.cli.main import main
from pose_plugin.doctor import diagnose, read_folder
from pose_plugin.doctor.compare import CONFIGURED, Compared, compare, judge
from pose_plugin.doctor.engines import readings
from pose_plugin.export.engines import RULES
from pose_plugin.utils.errors import PoSEError
from tests.doctor.broken import BROKEN, HEALTHY, LLAMA3, LLAMA3_ROPE, LORA, PHI3, QWEN3, SMALL, new, yarn
from tests.pages import benchmark, committed

ROOT = Path(__file__).parent.parent.parent
CONFIGS = ROOT / "tests" / "data" / "published_configs" / "models.jsonl"
MODELS = [json.loads(line) for line in CONFIGS.read_text(encoding="utf-8").splitlines()]


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values), encoding="utf-8")
    return folder


def name_of(row):
    return f"{row[1]}-{row[0].split(':')[0]}"


@pytest.fixture(params=BROKEN, ids=name_of)
def case(request, tmp_path):
    _, cause, files, base, repaired = request.param
    if base:
        write(tmp_path / "base", {"config.json": base})
    return write(tmp_path / "model", files), cause, repaired


def test_the_cause_comes_first(case):
    folder, cause, repaired = case
    problems = [each for each in diagnose(read_folder(folder)) if each.finding.severity != "info"]
    assert cause in [each.cause for each in problems]
    found = next(each for each in problems if each.cause == cause)
    assert found.finding.fix and bool(found.changes) == (repaired is not None)
    assert len(problems) <= 3, [each.cause for each in problems]


@pytest.mark.parametrize("case", [row for row in BROKEN if row[4] is not None], ids=name_of, indirect=True)
def test_the_repaired_copy_is_free_of_it(case, tmp_path):
    folder, cause, repaired = case
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert main(["doctor", str(folder), "--mend", str(tmp_path / "mended")]) in (1, 2)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    after = read_folder(tmp_path / "mended")
    assert cause not in [each.cause for each in diagnose(after)]
    for where, wanted in repaired.items():
        file, _, path = where.rpartition(":")
        value = after.files[file or "config.json"]
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        assert (value, type(value)) == (wanted, type(wanted)), where


@pytest.mark.parametrize("row", HEALTHY, ids=lambda row: row[0])
def test_a_healthy_folder_raises_no_alarm(row, tmp_path, capsys):
    _, files, base = row
    if base:
        write(tmp_path / "base", {"config.json": base})
    assert main(["doctor", str(write(tmp_path / "model", files))]) == 0, capsys.readouterr().out


def test_a_folder_without_findings(tmp_path, capsys):
    assert main(["doctor", str(write(tmp_path / "model", {"config.json": QWEN3}))]) == 0
    assert "no problem found" in capsys.readouterr().out


def test_several_folders_as_json(tmp_path, capsys):
    good = write(tmp_path / "good", {"config.json": SMALL})
    bad = write(tmp_path / "bad", {"config.json": {**QWEN3, "rope_scaling": yarn(4.0, 32768)}})
    assert main(["doctor", str(good), str(bad), "--json"]) == 1
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["problems"] == [] and second["problems"][0]["cause"] == "maximum not raised"
    assert second["problems"][0]["mendable"]


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", '{"a": ' * 3000, "\x00"])
def test_a_damaged_config_is_an_error(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert main(["doctor", str(tmp_path)]) == 2
    assert "damaged file: config.json: no reader can load it (" in capsys.readouterr().out


def test_weights_are_linked_and_not_read(tmp_path):
    folder = write(tmp_path / "model", {"config.json": {**QWEN3, "rope_scaling": yarn(4.0, 32768)}})
    (folder / "model.safetensors").write_bytes(b"not a model")
    for _ in range(2):  # the second time, the same copy is there
        assert main(["doctor", str(folder), "--mend", str(tmp_path / "mended")]) == 1
    assert (tmp_path / "mended" / "model.safetensors").samefile(folder / "model.safetensors")
    assert not (tmp_path / "mended" / "config.json").samefile(folder / "config.json")


def test_json_is_all_of_the_output(tmp_path, capsys):
    folder = write(tmp_path / "model", {"config.json": {**QWEN3, "rope_scaling": yarn(4.0, 32768)}})
    assert main(["doctor", str(folder), "--json", "--mend", str(tmp_path / "mended")]) == 1
    assert json.loads(capsys.readouterr().out)["folder"] == str(folder)


ODD = {
    "a base of 1": {"rope_theta": 1.0, "rope_scaling": yarn(4.0, 10240)},
    "a factor of 0": {"rope_scaling": yarn(0, 10240)},
    "a kind that is a list": {"rope_scaling": {**yarn(4.0, 10240), "rope_type": ["yarn"], "type": "yarn"}},
    "a window of 400 digits": {"max_position_embeddings": 10**400},
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ODD)
def test_no_value_stops_the_report(name, tmp_path, capsys):
    folder = write(tmp_path, {"config.json": {**QWEN3, **ODD[name]}})
    assert main(["doctor", str(folder)]) in (0, 2)
    shown = capsys.readouterr().out
    assert "what engines take: not known" in shown or shown.count("–  stops") == len(RULES), shown


def test_adapters_that_name_each_other(tmp_path):
    for name, other in (("one", "other"), ("other", "one")):
        write(tmp_path / name, {"adapter_config.json": {"base_model_name_or_path": str(tmp_path / other)}})
    assert main(["doctor", str(tmp_path / "one")]) == 0


def test_deepseeks_own_code_scales_its_logits_in_every_engine(tmp_path):
    """vLLM's and llama.cpp's usual YaRN do not read mscale."""
    model = next(model for model in MODELS if model["model"] == "deepseek-ai/DeepSeek-V3")
    folder = read_folder(write(tmp_path, {"config.json": model["config"]}))
    assert folder.rotary_dim == 64
    assert {row.rope for row in readings(folder)} == {"yarn"}


def test_a_maximum_raised_by_hand_is_found_with_the_model_before(tmp_path, capsys):
    before = write(tmp_path / "before", {"config.json": SMALL})
    files = {"config.json": {**SMALL, "max_position_embeddings": 32768}}
    folder = write(tmp_path / "model", {**files, "tokenizer_config.json": {"model_max_length": 8192}})
    line = ["doctor", str(folder), "--base", str(before)]
    assert main(line) == 1
    assert "maximum raised without frequencies" in capsys.readouterr().out
    # The tokenizer may be right, and config.json wrong.
    assert main([*line, "--mend", str(tmp_path / "mended")]) == 2
    assert not (tmp_path / "mended").exists()
    other = write(tmp_path / "other", {"config.json": {**files["config.json"], "rope_theta": 1e6}})
    assert main(["doctor", str(other), "--base", str(before)]) == 0, "another base stretches too"


def test_nothing_to_repair(tmp_path, capsys):
    folder = write(tmp_path / "model", {"config.json": SMALL})
    assert main(["doctor", str(folder), "--mend", str(tmp_path / "mended")]) == 0
    assert "nothing to repair" in capsys.readouterr().err and not (tmp_path / "mended").exists()


def test_an_adapter_without_config_names_its_base(tmp_path, capsys):
    write(tmp_path / "base", {"config.json": SMALL})
    folder = write(tmp_path / "adapter", {"adapter_config.json": LORA})
    assert main(["doctor", str(folder)]) == 0
    assert "up to 8192 tokens" in capsys.readouterr().out


def test_a_scaling_without_any_base_is_noted(tmp_path, capsys):
    config = {**SMALL, "rope_scaling": yarn(4.0, 8192), "max_position_embeddings": 32768}
    del config["rope_theta"]
    assert main(["doctor", str(write(tmp_path / "model", {"config.json": config}))]) == 0
    assert "info     rope_theta missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("built", "record", "fits"),
    [
        (8192, {"target_length": 4096}, False),
        (4096, {"target_length": 4096}, True),
        (8192, {"target_length": 8192, "target_margin": 64}, True),
        (8192, {"target_length": 8000, "target_margin": 192}, True),
        (8192, {"target_length": 8000, "target_margin": 191}, False),
        (None, {"target_length": 4096}, False),
    ],
)
def test_a_record_of_less_than_the_window(built, record, fits, tmp_path):
    """`rope: none` keeps the base's own window, and a model may be built for the margin."""
    noted = {"pose_plugin": {"rope": "none", "target_length": built}} if built else {}
    folder = write(tmp_path, {"config.json": {**SMALL, **noted}, "pose.json": record})
    assert ("record and config differ" not in [each.cause for each in diagnose(read_folder(folder))]) == fits


def test_without_a_factor_every_engine_stops(tmp_path):
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 8192}
    folder = write(tmp_path, {"config.json": {**SMALL, "rope_scaling": rope, "max_position_embeddings": 32768}})
    rows = readings(read_folder(folder))
    assert {row.window for row in rows} == {None}
    assert {row.rope for row in rows} == {"stops: factor is missing"}


def test_a_window_written_as_a_float_stops_engines_that_check_types(tmp_path):
    from transformers import AutoConfig

    folder = write(tmp_path, {"config.json": {**SMALL, "max_position_embeddings": 8192.0}})
    with pytest.raises(Exception, match=r"8192\.0"):
        AutoConfig.from_pretrained(folder)
    rows = {row.engine: row for row in readings(read_folder(folder))}
    assert rows["transformers ≥ 5"].window is None and "8192.0" in rows["transformers ≥ 5"].rope
    assert rows["transformers 4"].window == 8192


@pytest.mark.parametrize("known", ["nothing", "base", "record"])
def test_a_tokenizer_limit_is_repaired_if_the_maximum_is_known_to_be_right(known, tmp_path):
    files = {"config.json": QWEN3, "tokenizer_config.json": {"model_max_length": 8192}}
    if known == "record":
        files["pose.json"] = {"target_length": QWEN3["max_position_embeddings"]}
    folder = write(tmp_path / "model", files)
    base = write(tmp_path / "base", {"config.json": QWEN3}) if known == "base" else None
    (found,) = diagnose(read_folder(folder, base))
    assert found.cause == "tokenizer limit" and bool(found.changes) == (known != "nothing")


def test_what_engines_take_is_unknown_if_numbers_are_text(tmp_path, capsys):
    write(tmp_path, {"config.json": {**SMALL, "max_position_embeddings": "8192"}})
    assert main(["doctor", str(tmp_path)]) == 2
    assert "not known until the errors are repaired" in capsys.readouterr().out


def test_a_folder_with_torn_weights_is_an_error(tmp_path):
    """The safetensors library raises an error of its own."""
    pytest.importorskip("transformers")
    folder = Path(shutil.copytree(ROOT / "example_configs" / "quickstart" / "base", tmp_path / "base"))
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:999])
    with pytest.raises(PoSEError, match=r"--like .* does not load"):
        compare(SimpleNamespace(), read_folder(folder), "text", [1])


def test_far_answers_are_explained_by_no_rope():
    # A model without scaling has one rope, so there is no other to be nearer.
    assert Compared({CONFIGURED: 0.75}, logprobs=False).verdict == "none"
    assert Compared({CONFIGURED: 0.01}, logprobs=False).verdict == "unclear"


@pytest.mark.parametrize("mine, other, wanted", [(0.0, 0.3, "has no scaling"), (0.3, 0.0, "computes another rope")])
def test_a_folder_without_scaling_has_none_to_apply_or_ignore(mine, other, wanted, tmp_path):
    folder = read_folder(write(tmp_path, {"config.json": SMALL}))
    compared = Compared({CONFIGURED: mine, "without its scaling and its rope_theta": other}, logprobs=True)
    (finding,) = judge(SimpleNamespace(window=None), folder, compared)
    assert wanted in str(finding)


def without_torch(folders):
    command = [sys.executable, "-m", "tests.doctor.without_torch", *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_folders_of_other_trainers_need_neither_torch_nor_transformers(tmp_path):
    longrope = {"type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48}
    configs = {
        "yarn": {**QWEN3, "rope_scaling": yarn(4.0, 32768), "max_position_embeddings": 131072},
        "llama3": {**LLAMA3, "rope_scaling": LLAMA3_ROPE, "max_position_embeddings": 131072},
        # Its original window is next to the rope dict.
        "longrope": {**PHI3, "rope_scaling": longrope},
    }
    folders = [write(tmp_path / name, {"config.json": config}) for name, config in configs.items()]
    for folder, answers in without_torch(folders).items():
        assert answers.pop("check")[0] == 1, "without weights there is nothing to reload"
        refused = {command for command, (code, _) in answers.items() if code}
        # TGI computes longrope in its own way.
        assert refused == ({"export --engine tgi"} if folder.endswith("longrope") else set()), answers


def test_broken_folders_end_every_command_with_a_sentence(tmp_path):
    folders = []
    for number, (_, _, files, base, _) in enumerate(BROKEN):
        folders.append(write(tmp_path / str(number) / "model", files))
        if base:
            write(tmp_path / str(number) / "base", {"config.json": base})
    for answers in without_torch(folders).values():
        for command, (code, sentence) in answers.items():
            assert code in (0, 1, 2), command
            assert code != 2 or command == "doctor" or sentence.startswith("pose-plugin"), sentence


@pytest.mark.parametrize(
    "line, message",
    [
        ([], "name a folder"),
        (["{tmp}/config.json"], "is a file"),
        (["no/such/model"], "no/such/model"),
        (["{tmp}", "{tmp}", "--mend", "x"], "--mend x"),
    ],
)
def test_wrong_input(line, message, tmp_path, capsys):
    write(tmp_path, {"config.json": SMALL})
    assert main(["doctor", *(word.format(tmp=tmp_path) for word in line)]) == 2
    assert message in capsys.readouterr().err


def test_an_existing_output_is_left_alone(tmp_path, capsys):
    folder = write(tmp_path / "model", {"config.json": {**QWEN3, "rope_scaling": yarn(4.0, 32768)}})
    write(tmp_path / "there", {"config.json": SMALL})
    assert main(["doctor", str(folder), "--mend", str(tmp_path / "there")]) == 2
    assert "--mend" in capsys.readouterr().err
    assert json.loads((tmp_path / "there" / "config.json").read_text()) == SMALL
    assert main(["doctor", str(folder), "--mend", str(folder / "mended")]) == 2
    assert "is inside" in capsys.readouterr().err and not (folder / "mended").exists()


def test_the_page_lists_every_cause_and_shows_what_is_printed(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    files = (ROOT / "pose_plugin" / "doctor" / "checks").glob("*.py")
    sources = "".join(file.read_text(encoding="utf-8") for file in files)
    causes = set(re.findall(r'problem\(\s*"([^"]+)"', sources))
    assert len(causes) > 25
    named = {cause for cause in causes if cause in page}
    # What the messages alone explain well enough.
    rare = {"damaged file", "no config", "factor below 1", "longrope list missing", "longrope list of another length"}
    assert causes - named == rare | {"dynamic scaling", "new form only", "record and config differ"}
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "outputs" / "model", {"config.json": {**QWEN3, "rope_scaling": yarn(4.0, 32768)}})
    write(tmp_path / "models" / "before", {"config.json": QWEN3})
    (shown,) = re.findall(r"^```\n(outputs/model:.*?)^```", page, re.M | re.S)
    for line in re.findall(r"^pose-plugin (doctor outputs.*)$", page, re.M):
        assert main(line.split()) == 1
        assert shown in capsys.readouterr().out


def test_the_page_has_the_committed_table_of_real_servers():
    page, results = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8"), committed("doctor_servers")
    assert benchmark("doctor_servers").table(results) in page
    verdicts = {name: (row["rope"], row["code"]) for name, row in results["rows"].items()}
    assert verdicts == {
        "llama.cpp, override applied": ("applied", 0),
        "llama.cpp, override removed": ("other", 2),
        "transformers serve, override applied": ("applied", 0),
        "transformers serve, override removed": ("other", 2),
        "llama.cpp, override applied, weak model": ("applied", 1),
    }


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["model"])
def test_published_configs_raise_no_alarm(model, tmp_path):
    folder = read_folder(write(tmp_path, {"config.json": model["config"]}))
    assert [str(each.finding) for each in diagnose(folder) if each.finding.severity != "info"] == []
    readings(folder)


def test_engines_that_read_another_rope_are_shown(tmp_path, capsys):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "rope_theta": 1e5}
    folder = write(tmp_path / "model", {"config.json": new(SMALL, rope, max_position_embeddings=32768)})
    assert main(["doctor", str(folder)]) == 0
    lines = {line[4:24].strip(): line for line in capsys.readouterr().out.splitlines() if line.startswith("    ")}
    assert "differs" not in lines["transformers ≥ 5"] and "32768" in lines["transformers ≥ 5"]
    assert "differs" in lines["transformers 4"], "it does not see rope_parameters"


@pytest.mark.parametrize("command", ["export --engine vllm", "card"])
def test_other_commands_name_what_is_wrong(tmp_path, capsys, command):
    name, *options = command.split()
    for maximum in (32768, 8192):
        config = {**SMALL, "rope_scaling": yarn(4.0, 8192), "max_position_embeddings": maximum}
        folder = write(tmp_path / str(maximum), {"config.json": config})
        assert main([name, str(folder), *options]) == 0
        assert ("maximum not raised: `pose-plugin doctor" in capsys.readouterr().out) == (maximum == 8192)
