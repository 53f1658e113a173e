"""A result on disk is used for exactly what it was measured with, whoever wrote it."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import configuration_utils

from pose_plugin.beacon.register import NAME as BEACON
from pose_plugin.checkpoints import load as loading
from pose_plugin.checkpoints.load import describe, extended
from pose_plugin.cli import evaluate as command
from pose_plugin.cli import main as cli
from pose_plugin.evaluation import kept
from pose_plugin.evaluation.fingerprints import FINISHED
from pose_plugin.evaluation.measure import Windows
from pose_plugin.evaluation.measures import MEASURES, harness
from pose_plugin.evaluation.measures.longppl import LongPPL
from pose_plugin.evaluation.ranks import Ranks
from pose_plugin.evaluation.results import Result, Row
from pose_plugin.evaluation.run import Session
from pose_plugin.utils.errors import PoSEError

TEXT = "The quick brown fox jumps over the lazy dog. " * 60
ALL = (*MEASURES, "answer")
PROMPTS = {"passkey", "needle", "topics", "association", "ruler"}
TEXTS = {"haystack", "perplexity", "longppl", "gap", "short", "answer"}


@pytest.fixture
def folder(tmp_path, tokenizer, make_llama):
    make_llama().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def keys(folder, tmp_path, monkeypatch):
    """The key of every measure at one length, by what is asked for."""
    monkeypatch.setattr(harness, "version", lambda: "0.4.11")
    monkeypatch.setattr(harness, "require_harness", lambda *given: None)
    (tmp_path / "own" / "deeper").mkdir(parents=True)
    (tmp_path / "own" / "deeper" / "a.yaml").write_text("task: a")
    described = describe(str(folder))

    def of(source=described, dtype="auto", length=620, lengths=(620, 650), texts=(TEXT,), answer=(300,), **options):
        given = {"harness_path": str(tmp_path / "own"), "harness": ["own"], "evaluator": "judge"}
        given = {**given, "ruler_tasks": ["vt"], **options}
        measures = []
        for measure in MEASURES.values():
            own = {name: value for name, value in given.items() if name in measure.model_fields}
            measures.append(measure(**own, **({"texts": texts} if measure.needs_texts else {})))
        run = Session(measures, lengths, tmp_path / "out", dtype, None)
        run.check([source], None, Windows(base=256, trained=100))
        prepared = {measure.name: measure for measure in run._prepared[source.name]}
        run._said["longppl"] = {length: [list(answer)]}
        found = {name: run._key(source, measure, length) for name, measure in prepared.items()}
        found["answer"] = run.kept.key(source, prepared["longppl"], length, "answer")
        assert len(set(found.values())) == len(ALL)
        return found

    return of


def changed(one, other):
    return {task for task in ALL if one[task] != other[task]}


def test_each_option_counts_where_it_matters_and_only_there(keys):
    base = keys()
    table = [
        ({"trials": 7}, PROMPTS),
        ({"seed": 7}, PROMPTS | {"haystack", "harness"}),
        ({"facts": 7}, {"haystack"}),
        ({"depths": [0.5]}, {"passkey", "needle"}),
        ({"filler": "One. "}, PROMPTS),
        ({"texts": [TEXT.replace("quick", "slick")]}, TEXTS),
        ({"texts": [TEXT, TEXT]}, TEXTS),
        ({"max_tokens": 650}, TEXTS - {"gap", "haystack"}),
        ({"stride": 9}, {"perplexity", "short"}),
        ({"max_windows": 9}, {"perplexity", "gap", "short"}),
        ({"lengths": [620, 640]}, {"perplexity", "harness"}),
        ({"lengths": [610, 650]}, {"gap", "harness"}),
        ({"kinds": ["kv"]}, {"needle"}),
        ({"ruler_tasks": ["niah_single_1"]}, {"ruler"}),
        ({"short_context": 99}, {"longppl", "answer"}),
        ({"short_length": 99}, {"short"}),
        ({"answer": [301]}, {"longppl"}),
        ({"evaluator": "another"}, {"longppl", "answer"}),
        ({"harness": ["ruler"]}, {"harness"}),
        ({"harness_limit": 3}, {"harness"}),
        ({"harness_path": None}, {"harness"}),
        ({"batch_size": 2, "progress": False}, set()),
        ({"dtype": "bfloat16"}, set(ALL)),
        ({"length": 650}, set(ALL)),
    ]
    for changes, expected in table:
        assert changed(base, keys(**changes)) == expected, changes
    assert changed(keys(filler="One. "), keys(filler="Two. ")) == PROMPTS
    assert changed(base, keys()) == set()


def touch(file):
    """Another content of the same size, some time later."""
    content = file.read_bytes() if file.exists() else b""
    file.write_bytes(content[::-1])
    os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns + 10**9))


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("model.safetensors", True),
        ("pytorch_model.bin", True),
        ("tokenizer.json", True),
        ("tokenizer.model", True),
        ("tokenizer_config.json", True),
        ("generation_config.json", True),
        ("adapter_config.json", True),
        ("README.md", False),
        ("pose.json", False),
    ],
)
def test_each_file_of_a_model_counts(folder, name, counts, keys):
    source = describe(str(folder))
    base = keys(source)
    touch(folder / name)
    assert changed(base, keys(source)) == (set(ALL) if counts else set())


def test_what_else_a_result_depends_on(folder, tmp_path, keys, monkeypatch):
    source = describe(str(folder))
    base = keys(source)
    # A name is for readers.
    assert changed(base, keys(describe(str(folder), "another name"))) == set()
    # The same folder, however it is written.
    monkeypatch.chdir(folder.parent)
    for written in ("base", "./base/", f"../{folder.parent.name}/base"):
        assert changed(base, keys(describe(written))) == set()
    assert changed(base, keys(harness_path="./own")) == set()
    assert changed(base, keys(extended(source, 1024, {"type": "linear"}))) == set(ALL)
    # The same files elsewhere are another model; with the base of an adapter it is the same.
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    assert changed(base, keys(describe(str(other)))) == set(ALL)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    adapter = describe(str(tmp_path / "adapter"))
    trained = keys(adapter)
    assert changed(base, trained) == set(ALL)
    touch(folder / "model.safetensors")
    assert changed(trained, keys(adapter)) == set(ALL)
    touch(tmp_path / "own" / "deeper" / "a.yaml")
    again = keys(source)
    monkeypatch.setattr(harness, "version", lambda: "0.4.12")
    newer = keys(source)
    assert changed(again, newer) == {"harness"}
    # What Python and git write there, and the results themselves.
    for name in ("__pycache__/a.pyc", ".git/index", f"out/{FINISHED}", "out/figures/a.png"):
        (tmp_path / "own" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "own" / name).write_bytes(b"1")
    assert changed(newer, keys(source)) == set()
    touch(tmp_path / "own" / "deeper" / "a.yaml")
    assert changed(newer, keys(source)) == {"harness"}
    with monkeypatch.context() as other:
        other.setattr(configuration_utils, "__version__", "9")
        assert changed(again, keys(source)) == set(ALL)
    monkeypatch.setattr(kept, "__version__", "9")
    assert changed(again, keys(source)) == set(ALL)


def test_a_run_says_that_it_uses_kept_results_of_lm_eval(folder, tmp_path, monkeypatch):
    """The data of a task may have changed, which nothing notices."""
    monkeypatch.setattr(harness, "version", lambda: "0.4.11")
    monkeypatch.setattr(harness, "require_harness", lambda *given: None)
    source = describe(str(folder))

    def session(fresh=False, **options):
        run = Session([harness.Harness(harness=["own"], **options)], [620], tmp_path / "out", "auto", "cpu", fresh)
        run.check([source], None, Windows())
        return run

    first = session()
    first.kept.open(first.ranks)
    assert first.found([source]) == []
    (measure,) = first._prepared["base"]
    first._keep(source, measure, 620, Result("harness", "", (Row(0, 0.5, kind="own exact_match"),)))
    (sentence,) = session().found([source])
    assert sentence.startswith("base: results of harness kept from before, not measured again; if data sets or files")
    assert session(harness_limit=3).found([source]) == session(fresh=True).found([source]) == []


def test_a_hub_name_stands_for_itself(keys, folder):
    source = describe(str(folder))
    one, other = ((setattr(source, "base", name), setattr(source, "path", name), keys(source))[2] for name in "ab")
    assert changed(one, other) == set(ALL)
    source.revision = "v2"
    assert changed(other, keys(source)) == set(ALL)


@pytest.fixture
def hub(folder, monkeypatch):
    """The name org/base at a commit of the hub, and what was had of it at which revision."""
    import transformers

    state = SimpleNamespace(commit=None, asked=[])
    for name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"):
        kind = getattr(transformers, name)

        def had(path, *, own=kind.from_pretrained, name=name, **options):
            found = own(folder, **{key: value for key, value in options.items() if key != "revision"})
            if path == "org/base":
                state.asked.append((name, options.get("revision")))
                if name == "AutoConfig":
                    found._commit_hash = state.commit
            return found

        monkeypatch.setattr(kind, "from_pretrained", had)
    peft = SimpleNamespace(PeftModel=SimpleNamespace(from_pretrained=lambda model, path: model))
    monkeypatch.setattr(loading, "require_peft", lambda: peft)
    return state


def test_an_adapter_s_base_is_had_at_its_revision(hub, tmp_path):
    """Everything of a base on the hub: config, tokenizer, weights."""
    adapter = {"base_model_name_or_path": "org/base", "revision": "v2", "peft_type": "LORA"}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    loading.load(describe(str(tmp_path / "adapter")), device="cpu")
    assert set(hub.asked) == {(name, "v2") for name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM")}


def test_another_commit_of_a_hub_name_is_another_model(hub, folder, tmp_path, keys):
    """Also of the base of an adapter; the weights are those of the commit that was described."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    shutil.copy(folder / "config.json", tmp_path / "adapter")
    for path in ("org/base", str(tmp_path / "adapter")):
        found = []
        for hub.commit in (40 * "1", 40 * "2"):
            source = describe(path)
            loading.load(source, device="cpu")
            assert hub.asked[-1] == ("AutoModelForCausalLM", hub.commit)
            found.append(keys(source))
        assert changed(*found) == set(ALL)
    assert extended(describe("org/base"), 1024, {"type": "linear"}).revision == hub.commit


# --- the command ----------------------------------------------------------------------------------------------------


def evaluate(*arguments):
    return cli.main(["evaluate", *map(str, arguments), "--quiet", "--no-figures"])


def rows(output):
    return [json.loads(line) for line in (output / FINISHED).read_text(encoding="utf-8").split("\n") if line]


def test_results_that_nobody_can_read_are_measured_anew(folder, tmp_path, capsys, monkeypatch):
    """Rows of a hand, another program or another version: no traceback, and the readable ones are not measured."""
    (tmp_path / "t.txt").write_text(TEXT)
    out = tmp_path / "out"
    arguments = [folder, "--lengths", "200,220", "--trials", 1, "--tasks", "passkey,perplexity,gap", "--texts",
                 tmp_path / "t.txt", "--max-windows", 1, "--output", out]  # fmt: skip
    assert evaluate(*arguments) == 0
    whole, first = [row for row in rows(out) if "result" in row], (out / "results.json").read_text(encoding="utf-8")
    assert {row["version"] for row in whole} == {kept.__version__} and len(whole) == 6
    # With a new result, the answers to the two passkey prompts are new too.
    damages = [
        lambda r: {**r, "result": [1]},
        lambda r: {**r, "result": "x"},
        lambda r: {**r, "result": {}},
        lambda r: {**r, "result": {**r["result"], "rows": [{"new": 1}]}},
        lambda r: {**r, "key": None},
        lambda r: [r],
    ]
    for damage in damages:
        (out / "results.json").write_text("{ broken")
        (out / FINISHED).write_text("".join("\n" + json.dumps(each) for each in [*map(damage, whole[:-1]), whole[-1]]))
        assert evaluate(*arguments) == 0
        assert len(rows(out)) == 13 and (out / "results.json").read_text(encoding="utf-8") == first
    capsys.readouterr()
    monkeypatch.setattr(kept, "__version__", "9.0")
    assert evaluate(*arguments) == 0 and len(rows(out)) == 21
    assert f"results of pose_plugin {whole[0]['version']}" in capsys.readouterr().out


def sources(*arguments):
    import argparse

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args([*map(str, arguments), "--lengths", "200", "--output", "x"])
    asked = command._Asked(args)
    return command.local_sources(args.models, asked.names, asked.extensions)


def test_models_of_one_name_are_told_apart(folder, tmp_path):
    models = [tmp_path / run / "step-100" for run in ("a", "b")]
    for model in models:
        shutil.copytree(folder, model)
    names = lambda *arguments: [source.name for source in sources(*arguments)]  # noqa: E731
    assert names(*models, folder) == ["a/step-100", "b/step-100", "base"]
    assert names(models[0], folder) == ["step-100", "base"]
    assert names(models[0], models[0]) == ["step-100", "step-100 (2)"]
    assert names(*models, "--label", f"new={models[0]}") == ["new", "step-100"]
    twice = [models[0], models[0], folder, "--label", f"step-100 (2)={folder}"]
    assert names(*twice) == ["step-100", "step-100 (2)", "step-100 (2) (2)"]
    stretch = ["--extend", "target_length=1k,rope=linear"] * 2
    first = "a/step-100 + linear (RoPE only)"
    assert names(*models, *stretch) == ["a/step-100", first, f"{first} (2)", "b/step-100"]
    assert sources(folder, *stretch)[1].maximum == 1024
    with pytest.raises(PoSEError, match=r"--label x=.*b/step-100: x is another model's name already"):
        names(*models, "--label", f"x={models[0]}", "--label", f"x={models[1]}")


def test_who_selects_the_key_tokens(folder, tmp_path, monkeypatch):
    """By default the last MODEL, never a variant of `--extend`; a folder is that folder, and else a name is a name."""
    trained, elsewhere = (Path(shutil.copytree(folder, tmp_path / name)) for name in ("trained", "elsewhere/base"))
    stretch = ["--extend", "target_length=1k,rope=linear"]

    def chosen(models, variants=0, named=None):
        asking = SimpleNamespace(needs_evaluator=True, evaluator=named and str(named))
        return command._evaluator([asking], sources(*models, *stretch * variants), variants)

    assert [chosen([folder], n).maximum for n in (0, 1, 2)] == [256] * 3
    assert [chosen([folder, trained], n).name for n in (0, 1, 2)] == ["trained"] * 3
    assert chosen([folder, trained], 1, folder).name == chosen([folder, trained], 1, f"{folder}/").name == "base"
    assert chosen([folder], 1, "base + linear (RoPE only)").maximum == 1024
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert chosen([folder], named="base").path == "base" and chosen([folder], named=elsewhere).path == str(elsewhere)


def test_two_models_of_one_name_are_an_error(folder, tmp_path):
    """Tokenizers and answers are found by the name, so one would have those of the other."""
    one, other = describe(str(folder)), describe(str(folder))
    for models, evaluator in (([one, other], None), ([one], other)):
        with pytest.raises(PoSEError, match=r"names=\['base', 'base'\]"):
            Session([], [200], tmp_path / "out", "auto", "cpu").check(models, evaluator, Windows())
    Session([], [200], tmp_path / "out", "auto", "cpu").check([one], one, Windows())


def test_key_tokens_that_another_process_has_found_count(folder, tmp_path, monkeypatch):
    """Each of two processes lets the evaluator answer about one of two lengths; both measure both."""
    source, asked, found = describe(str(folder)), [], []
    monkeypatch.setattr(LongPPL, "ask", lambda self, model, n: asked.append(n) or [[n - 1]])
    monkeypatch.setattr(Session, "_open", lambda *given: None)
    monkeypatch.setattr(Ranks, "meet", lambda self, value=None: [value])
    for rank in (1, 0):
        run = Session([LongPPL(texts=[TEXT], short_context=100)], [400, 500], tmp_path / "out", "auto", "cpu")
        run.ranks = Ranks(rank, 2)
        run.check([source], source, Windows())
        run.kept.open(run.ranks)
        # The second one comes when the first one has finished its part, as if they had waited for each other.
        run._ask(source, run.ranks) if rank == 1 else run.ask(source)
        found.append((list(asked), run._prepared["base"][0].pieces()))
    assert found == [([500], [400, 500]), ([500, 400], [400, 500])]
    assert run._prepared["base"][0].answers == {400: [[399]], 500: [[499]]}


def test_what_beacons_read_beyond_the_window_is_no_fault(folder, tmp_path):
    notes = {}
    for kind in (BEACON, "LORA"):
        (tmp_path / kind).mkdir()
        config = {"base_model_name_or_path": str(folder), "peft_type": kind}
        (tmp_path / kind / "adapter_config.json").write_text(json.dumps(config))
        source = describe(str(tmp_path / kind))
        notes[kind] = [*source.notes, *command._beyond(source, [200, 300])]
    assert notes[BEACON] == [] and len(notes["LORA"]) == 2
    assert notes["LORA"][1] == "300 tokens are beyond this model's max_position_embeddings=256"
