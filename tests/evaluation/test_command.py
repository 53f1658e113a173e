import json
import sys

import pytest
import torch

from pose_plugin import cli
from pose_plugin.evaluation.loading import describe, extended, load

TEXT = "The quick brown fox jumps over the lazy dog. " * 60


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizers_by_name, make_llama):
    """base, an adapter with and one without the extended config beside it, and a text."""
    from peft import LoraConfig, get_peft_model

    root, tokenizer = tmp_path_factory.mktemp("models"), tokenizers_by_name["single digits"]
    base = make_llama()
    base.save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    for name in ("adapter", "bare"):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
            model = get_peft_model(make_llama(), lora)
        model.peft_config["default"].base_model_name_or_path = str(root / "base")
        model.save_pretrained(root / name)
    source = extended(describe(str(root / "base")), 1024, {"type": "linear"})
    source.config.save_pretrained(root / "adapter")
    record = {"train_length": 256, "target_length": 1024}
    (root / "adapter" / "pose.json").write_text(json.dumps(record))
    (root / "text.txt").write_text(TEXT, encoding="utf-8")
    return root


def run(*arguments):
    return cli.main(["evaluate", *map(str, arguments), "--quiet"])


def test_base_rope_only_and_adapter_side_by_side(folders, tmp_path, capsys):
    code = run(
        folders / "base", folders / "adapter", "--lengths", "200,300", "--trials", 3, "--texts",
        folders / "text.txt", "--extend", "target_length=1024,rope=linear", "--label",
        f"PoSE={folders / 'adapter'}", "--output", tmp_path,
    )  # fmt: skip
    assert code == 0
    data = json.loads((tmp_path / "results.json").read_text())
    assert [m["name"] for m in data["models"]] == ["base", "base + linear (RoPE only)", "PoSE"]
    assert [m["max_position_embeddings"] for m in data["models"]] == [256, 1024, 1024]
    assert data["models"][1]["rope_parameters"]["rope_type"] == "linear"
    assert (data["train_length"], data["target_length"]) == (256, 1024)
    assert data["models"][0]["notes"] == ["300 tokens are beyond this model's max_position_embeddings=256"]
    assert data["models"][1]["notes"] == []
    perplexities = [m["perplexity"]["by_length"]["300"]["perplexity"] for m in data["models"]]
    assert len(set(perplexities)) == 3
    names = {path.name for path in tmp_path.iterdir()}
    assert {"passkey.csv", "perplexity.csv", "report.md", "passkey.png", "passkey_depth.png"} <= names
    text = capsys.readouterr().out
    assert "Passkey accuracy" in text and "Sliding-window perplexity: strides" in text
    assert "There is an important info" in text and "[3/3] PoSE" in text


def test_an_adapter_is_put_on_the_base_with_its_own_config(folders):
    source = describe(str(folders / "adapter"))
    assert source.base == str(folders / "base") and source.is_adapter and source.notes == []
    model = load(source, device="cpu")
    assert model.config.max_position_embeddings == 1024
    plain = load(describe(str(folders / "base")), device="cpu")
    rotary, base_rotary = (m.get_decoder().rotary_emb.inv_freq for m in (model, plain))
    torch.testing.assert_close(rotary, base_rotary / 4)
    assert any("lora_" in name for name, _ in model.named_parameters())
    assert not model.training


def test_an_adapter_without_a_config_says_what_that_means(folders):
    source = describe(str(folders / "bare"))
    assert source.maximum == 256
    assert "no config.json" in source.notes[0]


def test_the_base_is_found_beside_the_adapter(folders, tmp_path, monkeypatch):
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "base").symlink_to(folders / "base")
    adapter = moved / "adapter"
    adapter.mkdir()
    config = json.loads((folders / "bare" / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "base"}))
    monkeypatch.chdir("/")
    assert describe(str(adapter)).base == str(moved / "base")


def test_real_filler_and_given_depths(folders, tmp_path):
    code = run(
        folders / "base", "--lengths", "200", "--trials", 2, "--depths", "0,1", "--no-figures",
        "--filler", folders / "text.txt", "--output", tmp_path / "new",
    )  # fmt: skip
    assert code == 0
    result = json.loads((tmp_path / "new" / "results.json").read_text())["models"][0]["passkey"]
    assert [cell["depth"] for cell in result["by_depth"]] == [0, 1]
    assert "quick brown fox" in result["example"] and "grass" not in result["example"]
    assert not list((tmp_path / "new").glob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["BASE", "--lengths", "200", "--tasks", "needle"], "unknown task needle; known: passkey, perp"),
        (["BASE", "--lengths", "200", "--tasks", "perplexity"], "add --texts FILE"),
        (["BASE", "--lengths", "20"], "length=20 is smaller than the passkey template"),
        (["BASE", "--lengths", "many"], "--lengths many must be token counts"),
        (["BASE", "--lengths", "0"], "0 must be at least 1 token"),
        (["ROOT/none", "--lengths", "200"], "none is no folder here"),
        (["ROOT", "--lengths", "200"], "holds neither config.json nor adapter_config.json"),
        (["BASE", "--lengths", "200", "--texts", "ROOT/no.txt"], "no.txt could not be read"),
        (["BASE", "--lengths", "200", "--label", "x"], "--label x must be NAME=PATH"),
        (["BASE", "--lengths", "200", "--label", "x=y"], "y is none of the models"),
        (["BASE", "--lengths", "200", "--extend", "rope=yarn"], "needs target_length"),
        (["BASE", "--lengths", "200", "--extend", "target_length=1024,rope=magic"], "magic"),
        (["ADAPTER", "--lengths", "200", "--extend", "target_length=1024"], "put its base first"),
        (["BASE", "--lengths", "200", "--depths", "deep"], "--depths deep must be numbers"),
        (["BASE", "--lengths", "200", "--trials", "0"], "trials=0"),
        (["BASE", "--lengths", "200", "--dtype", "float3"], "dtype='float3' is unknown"),
        (["BASE", "--lengths", "9000", "--texts", "TEXT", "--tasks", "perplexity"], "longest of 1 texts"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(folders, tmp_path, capsys, arguments, message):
    places = {"BASE": folders / "base", "ADAPTER": folders / "adapter", "TEXT": folders / "text.txt"}
    arguments = [str(places.get(a, a.replace("ROOT", str(folders)))) for a in arguments]
    assert run(*arguments, "--output", tmp_path) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("pose-plugin evaluate: ") and "Traceback" not in error


def test_an_output_that_is_a_file(folders, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(folders / "base", "--lengths", "200", "--output", tmp_path / "file") == 2
    assert "is a file" in capsys.readouterr().err


def test_missing_matplotlib_is_said_before_anything_is_measured(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(folders / "base", "--lengths", "200", "--output", tmp_path) == 2
    assert 'pip install "pose-plugin[plot]"' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_missing_peft_is_said(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert run(folders / "adapter", "--lengths", "200", "--output", tmp_path) == 2
    assert "pip install peft" in capsys.readouterr().err


def test_help_needs_no_torch():
    import subprocess

    code = "import sys; from pose_plugin.cli import main\ntry: main(['evaluate', '--help'])\n"
    code += "except SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "--lengths" in done.stdout and done.stdout.strip().endswith("False"), done.stderr
