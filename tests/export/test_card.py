"""README.md: metadata that the hub accepts, the section, and everything that others wrote."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard, ModelCardData

from pose_plugin.cli.main import main
from pose_plugin.evaluation.figures import draw
from pose_plugin.evaluation.report import markdown, write
from pose_plugin.evaluation.results import ModelResult, Report, Result, Row
from pose_plugin.export.card import BEGIN, END, write_card
from pose_plugin.utils.errors import PoSEError
from tests.forked import CaseError, forked
from tests.models import edit, make_llama, save_adapter, save_full

pytest.importorskip("peft")

# Five keys per length, at all distances; none is found more than 64 tokens back.
KEYS = tuple(Row(n, float(d <= 64), distance=d) for n in (64, 512) for d in range(n // 8, n, n // 5))


@pytest.fixture
def full(tmp_path) -> Path:
    save_full(tmp_path / "full")
    return tmp_path / "full"


def card(folder: Path) -> ModelCard:
    assert write_card(folder) == folder / "README.md"
    return ModelCard.load(folder / "README.md")


def test_metadata(full):
    data = card(full).data
    assert isinstance(data, ModelCardData)
    assert data.library_name == "transformers" and data.pipeline_tag == "text-generation"
    assert data.tags == ["long-context", "context-window-extension", "pose", "yarn"]
    # The base is a folder here, and the hub takes names of repositories only.
    assert data.base_model is None and data.datasets is None


def test_names_of_the_hub_are_kept_and_paths_are_not(full):
    edit(
        full / "pose.json",
        lambda record: record.update(
            base={"name": "meta-llama/Llama-2-7b-hf", "revision": None},
            data=["emozilla/pg19", "/data/rows.jsonl", "rows.jsonl"],
        ),
    )
    data = card(full).data
    assert data.base_model == "meta-llama/Llama-2-7b-hf" and data.datasets == ["emozilla/pg19"]
    assert "rows.jsonl" in (full / "README.md").read_text()


def test_the_section(full):
    text = card(full).text
    for line in (
        "# full: a context window of 512 tokens",
        "| window, tokens | 64 → 512 (8×) |",
        "windows of 64 tokens; all weights",
        "YaRN ([arXiv 2309.00071](https://arxiv.org/abs/2309.00071)), factor 8",
        "| theta before → after | 10000.0 → 10000.0 |",
        "vllm serve full --max-model-len 512",
        "llama-server -m full/full.gguf -c 512",
        "Extended to 512 tokens",
        "@inproceedings{zhu2024pose",
        "pose-plugin evaluate full --lengths 64,512 --output full/evaluation",
    ):
        assert line in text, line


def test_theta_after(tmp_path):
    save_full(tmp_path / "model", {"type": "base", "theta": 1e6})
    assert "| theta before → after | 10000.0 → 1000000.0 |" in card(tmp_path / "model").text


def test_adapter(tmp_path):
    save_adapter(tmp_path / "adapter", modules_to_save=["embed_tokens"])
    # PEFT has written its card, with the local base in its metadata.
    before = (tmp_path / "adapter" / "README.md").read_text()
    assert str(tmp_path) in before.split("---")[1]
    written = card(tmp_path / "adapter")
    assert written.data.library_name == "peft" and written.data.base_model is None
    assert not any(str(tmp_path) in tag for tag in written.data.tags) and "lora" in written.data.tags
    assert "LoRA of rank 4 and whole embed_tokens" in written.text
    assert "Model Card for Model ID" in written.text


def test_text_and_metadata_of_others_stay_and_the_section_is_renewed(full):
    (full / "README.md").write_text("---\nlicense: apache-2.0\ntags: [mine]\n---\n# Mine\n\nWords with a | pipe.\n")
    first = card(full)
    edit(full / "pose.json", lambda record: record.update(hardware="8 × H100"))
    second = card(full)
    assert second.data.license == "apache-2.0" and second.data.tags[0] == "mine"
    assert second.text.endswith("# Mine\n\nWords with a | pipe.\n")
    assert second.text.count(BEGIN) == second.text.count(END) == 1
    assert "8 × H100" in second.text and "8 × H100" not in first.text


def test_readme_without_metadata(full):
    (full / "README.md").write_text("# Mine\n")
    assert card(full).text.endswith("# Mine\n")


@pytest.mark.parametrize("inside", [True, False])
def test_evaluation(full, tmp_path, inside, capsys):
    judged = full / "judged" if inside else tmp_path / "judged"
    judged.mkdir()
    report = Report([ModelResult("full", {"passkey": Result("passkey", "", KEYS)})])
    (judged / "report.md").write_text(markdown(report), encoding="utf-8")
    (judged / "results.json").write_text("{}")
    (judged / "passkey.png").write_bytes(b"png")
    assert main(["card", str(full), *([] if inside else ["--evaluation", str(judged)])]) == 0
    text = (full / "README.md").read_text()
    name = "judged" if inside else "evaluation"
    assert "| full  | 1.00 ±0.00 | 0.20 ±0.18 |    64 |" in text and f"![passkey]({name}/passkey.png)" in text
    assert (full / name / "passkey.png").exists() and "Not evaluated" not in text
    assert "Effective length by passkey (k_max): full 64 tokens. Up to this distance from the end, at least" in text


def test_only_the_newest_report_is_shown_and_kept(full, tmp_path):
    """Files of an earlier report are about a model that may have changed since."""
    judged = tmp_path / "judged"
    judged.mkdir()
    first = Report([ModelResult("full", {name: Result(name, "", KEYS) for name in ("passkey", "needle")})])
    for report in (first, Report([ModelResult("full", {"passkey": Result("passkey", "", KEYS)})])):
        write(report, judged, draw(report, judged))
        write_card(full, judged)
        names = {file.name for file in (full / "evaluation").iterdir()}
        assert ("needle.png" in names) == ("needle.csv" in names) == (report is first)
        assert {"passkey.png", "passkey.csv", "report.md", "results.json"} <= names
        assert ("evaluation/needle.png" in (full / "README.md").read_text()) == (report is first)
    assert not list(judged.glob("needle*")) and (judged / "passkey.svg").exists()


def test_bad_input(full, tmp_path, capsys):
    assert main(["card", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
    with pytest.raises(PoSEError, match=r"report\.md"):
        write_card(full, tmp_path)


def test_a_run_writes_no_card_into_a_foreign_folder_but_the_command_does(full):
    for name in ("pose.json", "pose_probe.json"):
        (full / name).unlink()
    assert write_card(full) is None and not (full / "README.md").exists()
    assert main(["card", str(full)]) == 0
    text = (full / "README.md").read_text()
    assert "**Warning:** full has no pose.json" in text and "| window, tokens | 64 → 512 (8×) |" in text
    assert "[PoSE]" not in text and "steps" not in text


def test_a_model_that_was_not_extended_has_a_card_that_says_nothing_else(tmp_path):
    make_llama().save_pretrained(tmp_path / "plain")
    assert main(["card", str(tmp_path / "plain")]) == 0
    text = (tmp_path / "plain" / "README.md").read_text()
    assert "| window, tokens | 64 |" in text and "The window ends at 64 tokens" in text
    assert "Extended" not in text and "zhu2024pose" not in text and "--lengths 64 " in text


def test_a_run_of_no_steps_is_in_the_card(full, capsys):
    edit(full / "pose.json", lambda record: record.update(trained={"steps": 0}))
    assert main(["card", str(full)]) == 0
    assert "**Warning:** pose.json has steps=0" in (full / "README.md").read_text()
    assert "WARNING: pose.json has steps=0" in capsys.readouterr().out


def test_no_path_is_published(tmp_path):
    """Of the base or the data; PEFT's own adapter_config.json has to name the base."""
    save_adapter(tmp_path / "adapter")
    edit(tmp_path / "adapter" / "pose.json", lambda record: record.update(data=[str(tmp_path / "rows.jsonl")]))
    write_card(tmp_path / "adapter")
    section = (tmp_path / "adapter" / "README.md").read_text().split(END)[0]
    assert str(tmp_path) not in section and "| base | base |" in section and "rows.jsonl" in section
    assert str(tmp_path) not in json.dumps(json.loads((tmp_path / "adapter" / "pose.json").read_text())["base"])


@pytest.mark.parametrize("content", ["tags: 7", "tags: [7, a]", "base_model: {a: b}", "datasets: 3", "1: x"])
def test_metadata_of_another_type_is_no_traceback(full, content, capsys):
    (full / "README.md").write_text(f"---\n{content}\n---\n# Mine\n")
    assert main(["card", str(full)]) in (0, 2)
    assert "# Mine" in (full / "README.md").read_text()


@pytest.mark.parametrize(
    "content", [b"# Mine \xe9\n", b"---\nlicense: [mit\n---\n# Mine\n", b"---\n- a\n---\n# Mine\n"]
)
def test_a_readme_that_cannot_be_read_is_left_as_it_is(full, content, capsys):
    (full / "README.md").write_bytes(content)
    assert main(["card", str(full)]) == 2
    assert "README.md" in capsys.readouterr().err
    assert (full / "README.md").read_bytes() == content


def test_a_mark_of_byte_order_hides_no_metadata(full):
    (full / "README.md").write_bytes(b"\xef\xbb\xbf---\nlicense: mit\n---\n# Mine\n")
    assert card(full).data.license == "mit"


def test_at_the_end_of_a_run_a_half_written_tokenizer_is_waited_for(full, monkeypatch, caplog):
    """Axolotl writes the tokenizer on every rank, and the one that writes the card may find it half written."""
    from pose_plugin.training import saving

    file = full / "tokenizer_config.json"
    whole, waits = file.read_text(), []

    def another_rank_goes_on(seconds):
        waits.append(seconds)
        file.write_text(whole if len(waits) == 2 else "")

    monkeypatch.setattr(saving.time, "sleep", another_rank_goes_on)
    file.write_text("")
    saving.complete_card(full)
    assert len(waits) == 2 and BEGIN in (full / "README.md").read_text() and not caplog.records

    waits[:] = [0.0] * 2
    file.write_text("")
    saving.complete_card(full)
    assert "no model card" in caplog.text and "not valid JSON" in caplog.text


def test_a_users_text_survives_a_kill_while_the_framework_writes_its_card(tmp_path):
    """A real kill, and a second run into the same folder."""
    pytest.importorskip("transformers")
    readme = tmp_path / "README.md"
    readme.write_text("my words\n")

    def run(killed: bool) -> None:
        from pose_plugin.training.saving import ModelCard

        trainer: Any = SimpleNamespace(
            args=SimpleNamespace(output_dir=str(tmp_path)),
            is_world_process_zero=lambda: True,
            processing_class=None,
        )
        with ModelCard(trainer, 512).rewritten():
            readme.write_text("the framework's\n")
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(CaseError, match="the child died"):
        forked(run, True)
    assert readme.read_text() == "the framework's\n"
    forked(run, False)
    assert readme.read_text() == "my words\n" and list(tmp_path.iterdir()) == [readme]


def test_a_name_with_a_space_is_quoted(tmp_path, capsys):
    folder = tmp_path / "my model"
    folder.mkdir()
    config = {"model_type": "llama", "rope_theta": 1e4, "max_position_embeddings": 64, "seq_length": 32}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["card", str(folder)]) == 0
    assert f"`pose-plugin doctor '{folder}'`" in capsys.readouterr().out
    text = (folder / "README.md").read_text()
    assert "pose-plugin evaluate 'my model' " in text and "`pose-plugin export 'my model' " in text
