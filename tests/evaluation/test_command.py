import json
import re
import sys

import pytest
import torch

from pose_plugin.checkpoints.load import describe, extended, load
from pose_plugin.cli import evaluate as command
from pose_plugin.cli import main as cli
from pose_plugin.cli.parser import Parser
from pose_plugin.evaluation import memory
from pose_plugin.evaluation.measures.longppl import LongPPL
from pose_plugin.evaluation.measures.passkey import Passkey
from pose_plugin.utils.errors import PoSEError
from tests import kill

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
    (root / "empty.txt").write_text("\n")
    (root / "binary.txt").write_bytes(bytes(range(256)))
    base.save_pretrained(root / "no-tokenizer")
    for name, named in {"gone": str(root / "nowhere"), "no-base": None}.items():
        (root / name).mkdir()
        config = json.loads((root / "bare" / "adapter_config.json").read_text())
        (root / name / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": named}))
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
    perplexities = [m["perplexity"]["scores"]["perplexity/300"] for m in data["models"]]
    assert len(set(perplexities)) == 3
    names = {path.name for path in tmp_path.iterdir()}
    assert {"passkey.csv", "perplexity.csv", "report.md", "passkey.png", "passkey_depth.png"} <= names
    text = capsys.readouterr().out
    assert "Passkey accuracy" in text and "300: stride 150" in text
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
    assert [row["depth"] for row in result["rows"]] == [0, 1]
    assert "quick brown fox" in result["examples"][""] and "grass" not in result["examples"][""]
    assert not list((tmp_path / "new").glob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["BASE", "--lengths", "200", "--tasks", "needles"], "--tasks=needles"),
        (["BASE", "--lengths", "200", "--tasks", "gap"], "--tasks=gap needs texts"),
        (["BASE", "--lengths", "200", "--tasks", "needle"], "length=200"),
        (["BASE", "--lengths", "400", "--tasks", "needle", "--kinds", "all"], "kinds=['all']"),
        (["BASE", "--lengths", "200", "--tasks", "longppl", "--texts", "TEXT"], "[200]"),
        (["BASE", "--lengths", "99", "--tasks", "short", "--texts", "TEXT", "--short-length", "9000"], "length=9000"),
        (["BASE", "--lengths", "200", "--max-windows", "3"], "--max-windows=3 has no effect without perplexity"),
        (["BASE", "--lengths", "many"], "--lengths many"),
        (["BASE", "--lengths", "1000000000"], "length=1000000000 needs about"),
        (["ROOT/none", "--lengths", "200"], "ROOT/none"),
        (["ROOT/gone", "--lengths", "200"], "ROOT/nowhere"),
        (["BASE", "--lengths", "200", "--label", "x=y"], "is none of the models ROOT/base\n"),
        (["BASE", "--lengths", "200", "--label", "=y"], "--label =y must be NAME=PATH, e.g. trained=ROOT/base\n"),
        (["y", "--lengths", "200", "--label", "x=y", "--label", "z=y"], "--label z=y"),
        (["BASE", "--lengths", "200", "--extend", "rope=yarn"], "--extend rope=yarn"),
        (["BASE", "--lengths", "200", "--extend", "target_length=1024,rope=magic"], "magic"),
        (["BASE", "--lengths", "200", "--extend", "target_length=1k,rope=yarn,rope=ntk"], "ntk: a key is given twice"),
        (["ADAPTER", "--lengths", "200", "--extend", "target_length=1024"], "ROOT/adapter"),
        (["BASE", "--lengths", "200", "--depths", "2"], "depths=2"),
        (["BASE", "--lengths", "200", "--dtype", "float3"], "dtype='float3'"),
        (["BASE", "ADAPTER", "--lengths", "200", "--dtype", "bf16"], "dtype='bf16'"),
        (["BASE", "--lengths", "200", "--device", "banana"], "device='banana'"),
        (["BASE", "--lengths", "200", "--texts", "ROOT/no.txt"], "no.txt"),
        (["BASE", "--lengths", "200", "--texts", "ROOT/binary.txt"], "binary.txt"),
        (["BASE", "--lengths", "200", "--texts", "TEXT", "TEXT"], "twice"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(folders, tmp_path, capsys, monkeypatch, arguments, message):
    # This machine may have more memory than a billion tokens take.
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**38)
    places = {"BASE": folders / "base", "ADAPTER": folders / "adapter", "TEXT": folders / "text.txt"}
    arguments = [str(places.get(a, a.replace("ROOT", str(folders)))) for a in arguments]
    assert run(*arguments, "--output", tmp_path) == 2
    error = capsys.readouterr().err
    assert message.replace("ROOT", str(folders)) in error and error.count("\n") == 1
    assert error.startswith("pose-plugin evaluate: ") and "Traceback" not in error


def test_all_complaints_come_at_once(folders, tmp_path, capsys):
    """Those about options before anything heavy is imported, those about lengths and models together."""
    bad = ["--lengths", "2x,200", "--tasks", "gap,pass", "--trials", "0", "--label", "x", "--extend", "rope=yarn"]
    assert run("./none", *bad, "--target-length", "many", "--output", tmp_path) == 2
    error = capsys.readouterr().err
    named = ["--lengths 2x,200", "--tasks=gap", "--tasks=pass", "--trials 0", "--label x", "--extend rope=yarn"]
    assert [error.count(text) for text in [*named, "--target-length many", "./none does not exist"]] == [1] * 8
    models = [folders / "base", folders / "adapter"]
    arguments = ["--tasks", "passkey,needle,topics,perplexity", "--texts", folders / "text.txt", "--output", tmp_path]
    assert run(*models, "--lengths", "20,9000", *arguments) == 2
    # Both models have the same complaints.
    assert capsys.readouterr().err.count("\n") == 4


def test_without_lengths_they_follow_from_the_target(folders, tmp_path, capsys, monkeypatch):
    """An eighth of it to twice it; lengths that a measure cannot be measured at, or no memory holds, are left out."""
    asked = measured(monkeypatch)
    # Room for 1,024 tokens, not for 2,048.
    config = describe(str(folders / "base")).config
    free = memory.estimate_bytes(config, 1024, 256, 4)
    monkeypatch.setattr(memory, "available_bytes", lambda device: free)
    arguments = ["--trials", 1, "--no-figures", "--texts", folders / "text.txt", "--max-windows", 1]
    assert run(folders / "adapter", *arguments, "--output", tmp_path) == 0
    assert asked == [128, 256, 512, 1024]
    out = capsys.readouterr().out
    assert "perplexity is not measured at 1024, 2048" in out and "passkey at 2048 is left out" in out
    row = json.loads((tmp_path / "results.json").read_text())["models"][0]
    assert list(row["passkey"]["scores"]) == [f"passkey/{n}" for n in asked]
    assert list(row["perplexity"]["scores"]) == [f"perplexity/{n}" for n in asked[:3]]
    # Readers of the results learn it too, and a length that a measure cannot have is no failure.
    reason = "perplexity at 1024, 2048 was left out: length="
    assert any(reason in note for note in row["notes"]) and reason in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("place", ["file/below", "finished.jsonl is a folder", "results.json is a folder"])
def test_an_output_that_cannot_be_written(folders, tmp_path, capsys, place):
    output = tmp_path / place.split()[0]
    if place == "file/below":
        (tmp_path / "file").write_text("")
    else:
        output = tmp_path
        (output / place.split()[0]).mkdir()
    assert run(folders / "base", "--lengths", "200", "--trials", 1, "--no-figures", "--output", output) == 2
    assert f"--output {output} cannot be used (" in capsys.readouterr().err


def measured(monkeypatch, stop_at=None):
    """The lengths that passkeys are measured at; interrupted once when they are `stop_at`."""
    asked, run_passkey = [], Passkey.run

    def counted(self, model, length):
        asked.append(length)
        if asked == stop_at:
            raise KeyboardInterrupt
        return run_passkey(self, model, length)

    monkeypatch.setattr(Passkey, "run", counted)
    return asked


def test_a_length_that_no_memory_holds_makes_no_prompts(folders, tmp_path, capsys, monkeypatch):
    asked = measured(monkeypatch)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**38)
    arguments = ["--lengths", "200,1000000000", "--trials", 1, "--no-figures", "--output", tmp_path]
    assert run(folders / "base", *arguments) == 1 and asked == [200]
    assert "passkey at 1000000000 was left out" in (tmp_path / "report.md").read_text()


def test_far_positions_need_no_memory(folders, tmp_path, capsys):
    """The gap probe reads short pieces, and `short` one window, whatever lengths are asked for."""
    arguments = ["--lengths", "2000000000", "--texts", folders / "text.txt", "--no-figures", "--output", tmp_path]
    assert run(folders / "base", "--tasks", "gap,short", *arguments) == 0
    (row,) = json.loads((tmp_path / "results.json").read_text())["models"]
    assert list(row["gap"]["scores"]) == ["gap_loss/640", "gap_loss/2000000000"]
    assert run(folders / "base", "--tasks", "gap,passkey", *arguments) == 2
    assert "length=2000000000 needs about" in capsys.readouterr().err


def test_what_a_text_is_too_short_for_is_named(folders, tmp_path, capsys):
    """Neither window follows from --lengths alone, so another length would be no mend."""
    (tmp_path / "text.txt").write_text("a few words")
    arguments = ["--lengths", "64", "--texts", tmp_path / "text.txt", "--no-figures", "--output", tmp_path]
    for task, message in (("short", "short_length=256 "), ("gap", "tokens=64 "), ("perplexity", "length=64 ")):
        assert run(folders / "base", "--tasks", task, *arguments) == 2
        assert f"evaluate: {message}is more than the longest of 1 text has" in capsys.readouterr().err


def test_a_model_that_loads_and_does_not_run(folders, tmp_path, capsys, monkeypatch):
    """As 4-bit weights whose kernel wants other sizes."""

    def broken(*args, **kwargs):
        raise RuntimeError("shape '[32, 0]' is invalid\nfor many reasons")

    monkeypatch.setattr("pose_plugin.evaluation.run.forecast", broken)
    assert run(folders / "base", "--lengths", "200", "--trials", 1, "--no-figures", "--output", tmp_path) == 2
    error = capsys.readouterr().err
    assert "base was loaded, but cannot run on cpu: shape '[32, 0]' is invalid" in error


@pytest.mark.parametrize("kind", ["tied", "bfloat16", "sliding", "no special tokens"])
def test_kinds_of_models(tmp_path, tokenizers_by_name, make_llama, kind):
    """What they have in common: every task finds finite figures, and losses are those of one plain forward."""
    from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

    model, tokenizer = make_llama(tie_word_embeddings=kind == "tied"), tokenizers_by_name["single digits"]
    if kind == "bfloat16":
        model = model.to(torch.bfloat16)
    if kind == "sliding":
        torch.manual_seed(0)
        model = MistralForCausalLM(MistralConfig(**(model.config.to_dict() | {"sliding_window": 64}))).eval()
    if kind == "no special tokens":
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    code = run(tmp_path / "model", "--lengths", "200", "--trials", 2, "--texts", tmp_path / "text.txt", "--no-figures",
               "--tasks", "passkey,perplexity,gap", "--max-windows", 1, "--output", tmp_path / "out")  # fmt: skip
    assert code == 0
    row = json.loads((tmp_path / "out" / "results.json").read_text())["models"][0]
    ids = torch.tensor([tokenizer(TEXT)["input_ids"][:200]])
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1].float(), ids[0, 1:])
    found = row["perplexity"]["rows"][0]["details"]["loss"]
    assert found == pytest.approx(float(expected), rel=1e-4 if kind != "bfloat16" else 2e-2)
    assert row["gap"]["scores"]["gap_loss/200"] > 0 and len(row["passkey"]["rows"]) == 2


def test_missing_matplotlib_is_said_before_anything_is_measured(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(folders / "base", "--lengths", "200", "--output", tmp_path) == 2
    assert 'pip install "matplotlib' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def generous(monkeypatch):
    """Nothing is far from everything in a random model, so every token is taken for a key token."""
    ask, limits = LongPPL.ask, {"alpha": -99.0, "beta": -99.0}
    monkeypatch.setattr(LongPPL, "ask", lambda self, *given: ask(self.model_copy(update=limits), *given))


def test_all_tasks_side_by_side_and_the_best_is_named(folders, tmp_path, capsys, monkeypatch):
    generous(monkeypatch)
    arguments = [
        folders / "base", folders / "adapter", "--extend", "target_length=1024,rope=linear", "--lengths", "420,500",
        "--tasks", "passkey,perplexity,needle,longppl,gap,short", "--texts", folders / "text.txt", "--trials", 5,
        "--short-context", 128, "--short-length", 200, "--max-windows", 2, "--output", tmp_path,
    ]  # fmt: skip
    assert run(*arguments) == 0
    text = capsys.readouterr().out
    data = json.loads((tmp_path / "results.json").read_text())
    for row in data["models"]:
        assert set(row["needle"]["scores"]) == {
            f"needle/{k}/{n}" for k in ("single", "multi", "kv") for n in (420, 500)
        }
        assert list(row["gap"]["scores"]) == ["gap_loss/420", "gap_loss/500"]
        assert list(row["short"]["scores"]) == ["short_perplexity/200"]
        assert list(row["longppl"]["scores"]) == ["longppl/420", "longppl/500"]
        assert "the evaluator, adapter," in row["longppl"]["definition"]
    assert "Best over all measures: " in text and data["best"] in text
    assert "Short-context guard: perplexity at 200" in text and "Needle, kv: mean score" in text
    assert "One needle prompt (kv):" in text
    assert "420 tokens ×" in text and "together about" in text and "GiB besides the weights" in text
    names = {path.name for path in tmp_path.iterdir()}
    assert {"needle_single.png", "needle_kv.png", "longppl.png", "gap.png", "needle.csv", "longppl.csv", "gap.csv",
            "short.csv", "report.html", "report.md"} <= names  # fmt: skip
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/svg+xml;base64,") == len([name for name in names if name.endswith(".png")])
    assert "Needle, single: mean score" in page and "Best by measure" in page

    # The same command again loads no model and measures nothing.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pose_plugin.evaluation.run.load", lambda *a: pytest.fail("loaded"))
        assert run(*arguments) == 0
        assert capsys.readouterr().out.count("nothing is missing") == 3
    assert run(*arguments, "--plan") == 0
    assert capsys.readouterr().out.count("nothing is missing") == 3
    assert json.loads((tmp_path / "results.json").read_text()) == data


def test_an_evaluator_of_the_same_folder_name_answers_for_itself(folders, tmp_path, monkeypatch, make_llama):
    generous(monkeypatch)
    other = tmp_path / "other" / "base"
    make_llama(seed=1).save_pretrained(other)
    describe(str(folders / "base")).tokenizer.save_pretrained(other)

    def answers(*more):
        output = tmp_path / f"out{len(more)}"
        arguments = [folders / "base", "--lengths", "420", "--trials", 3, *more, "--no-figures", "--output", output]
        assert run(*arguments) == 0
        found = json.loads((output / "results.json").read_text())["models"][0]
        return [row["details"] for row in found["passkey"]["rows"]], found.get("longppl", {}).get("definition", "")

    alone, _ = answers("--tasks", "passkey")
    judged, definition = answers("--tasks", "passkey,longppl", "--evaluator", other, "--texts",
                                 folders / "text.txt", "--short-context", 128)  # fmt: skip
    assert judged == alone and "the evaluator, base (2)," in definition


def test_tasks_of_lm_eval_alone_are_what_is_measured(folders):
    parser, text = Parser(), str(folders / "text.txt")
    command.add_arguments(parser)

    def measured(*words):
        return [measure.name for measure in command._measures(parser.read(["base", "--output", "out", *words]))]

    assert measured() == ["passkey"] and measured("--texts", text) == ["passkey", "perplexity"]
    assert measured("--harness", "own") == ["harness"]
    assert measured("--harness", "own", "--tasks", "perplexity", "--texts", text) == ["perplexity", "harness"]
    with pytest.raises(PoSEError, match=r"--texts .*text.txt has no effect with --harness alone"):
        measured("--harness", "own", "--texts", text)
    with pytest.raises(PoSEError, match="--trials=3 has no effect without passkey"):
        measured("--harness", "own", "--trials", "3")


def test_short_reads_the_base_s_window_whatever_model_is_first(folders, tmp_path):
    """Of an adapter the window before the stretch, 256 tokens, and not the 1,024 of its config."""
    code = run(folders / "adapter", "--lengths", "200", "--tasks", "short", "--texts", folders / "text.txt",
               "--max-windows", 1, "--no-figures", "--output", tmp_path)  # fmt: skip
    assert code == 0
    row = json.loads((tmp_path / "results.json").read_text())["models"][0]
    assert list(row["short"]["scores"]) == ["short_perplexity/256"]


def test_topics_and_the_plan(folders, tmp_path, capsys):
    arguments = [folders / "base", "--lengths", "1000", "--tasks", "topics", "--trials", 2, "--output", tmp_path]
    assert run(*arguments, "--plan") == 0
    assert "topics          1000 tokens ×     2  about" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert run(*arguments, "--no-figures") == 0
    row = json.loads((tmp_path / "results.json").read_text())["models"][0]
    assert row["topics"]["scores"] == {"topics/first/1000": 0.0} and row["topics"]["rows"][0]["note"] == "chance 1/5"


def test_the_plan_counts_the_evaluator(folders, tmp_path, capsys):
    arguments = [folders / "base", "--lengths", "300", "--tasks", "longppl", "--texts", folders / "text.txt",
                 "--short-context", "100", "--evaluator", folders / "adapter", "--output", tmp_path]  # fmt: skip
    assert run(*arguments, "--plan") == 0
    evaluator, model = capsys.readouterr().out.strip().split("\n\n")
    assert re.findall(r"longppl +(\d+) tokens × +(\d+)  about", model) == [("300", "1")]
    assert evaluator.startswith("adapter, as the evaluator\n")
    assert re.findall(r"longppl +(\d+) tokens × +(\d+)  about", evaluator) == [("300", "1"), ("125", "8")]


def test_a_stop_keeps_what_is_finished_and_the_same_command_goes_on(folders, tmp_path, capsys, monkeypatch):
    arguments = [folders / "base", "--lengths", "200,220,240", "--trials", 2, "--output", tmp_path, "--no-figures"]
    asked = measured(monkeypatch, stop_at=[200, 220])
    assert run(*arguments) == 130
    assert "Stopped." in capsys.readouterr().out
    with (tmp_path / "finished.jsonl").open("a") as file:
        file.write('\n{"key": "torn')
    assert run(*arguments) == 0
    assert asked == [200, 220, 220, 240]
    whole = json.loads((tmp_path / "results.json").read_text())["models"][0]["passkey"]
    assert run(*arguments, "--fresh") == 0 and len(asked) == 7
    assert json.loads((tmp_path / "results.json").read_text())["models"][0]["passkey"] == whole
    # What changes the result is measured anew, what does not is not.
    assert run(*arguments, "--seed", 1) == 0 and len(asked) == 10
    assert run(*arguments, "--label", f"x={folders / 'base'}") == 0 and len(asked) == 10
    assert run(*arguments, "--dtype", "bfloat16") == 0 and len(asked) == 13


def test_what_does_not_fit_is_left_out_and_said(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: memory.LOGIT_BYTES + 2**20)
    code = run(folders / "base", "--lengths", "200,4000,8000", "--trials", 2, "--output", tmp_path, "--no-figures")
    assert code == 1
    row = json.loads((tmp_path / "results.json").read_text())["models"][0]
    assert list(row["passkey"]["scores"]) == ["passkey/200"]
    assert "passkey at 4000 was left out" in row["notes"][-1] and "free on cpu" in row["notes"][-1]
    assert "does not fit" in capsys.readouterr().out


def test_another_tokenizer_cannot_name_key_tokens(folders, tmp_path, capsys, tokenizers_by_name, make_llama):
    other = tmp_path / "other"
    make_llama(1600).save_pretrained(other)
    tokenizers_by_name["joined digits"].save_pretrained(other)
    code = run(folders / "base", "--lengths", "400", "--tasks", "longppl", "--texts", folders / "text.txt",
               "--short-context", 100, "--evaluator", other, "--output", tmp_path / "out")  # fmt: skip
    assert code == 2 and "have different tokenizers" in capsys.readouterr().err


def test_what_cannot_be_measured_does_not_stop_the_rest(folders, tmp_path, capsys):
    code = run(folders / "base", "--lengths", "300", "--tasks", "longppl,passkey", "--texts", folders / "text.txt",
               "--short-context", 100, "--trials", 2, "--no-figures", "--output", tmp_path)  # fmt: skip
    assert code == 1
    row = json.loads((tmp_path / "results.json").read_text())["models"][0]
    assert "no token gains 2 nats" in row["notes"][-1] and "passkey" in row and "longppl" not in row


def test_a_run_that_is_killed_at_any_moment_and_run_again_is_one_that_was_not(folders, tmp_path):
    def evaluate(output):
        return run(
            folders / "base", "--lengths", "400,500", "--tasks", "passkey,haystack,perplexity", "--trials", 1,
            "--facts", 2, "--max-windows", 1, "--texts", folders / "text.txt", "--no-figures", "--output", output,
        )  # fmt: skip

    def found(output):
        kept = kill.files(output)
        lines = set(kept.pop("finished.jsonl").splitlines())
        return kept, sorted(line for line in lines if line.endswith(b"}"))

    kill.survives(evaluate, tmp_path, result=found)
