"""Chats through the real Axolotl: where jumps stand, what is in the loss, what happens to rows that are too long."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")

from pose_plugin.plan.config_reader import from_values
from pose_plugin.positions.turn_borders import turn_borders, turn_tokens
from tests.chat_data import chat, chat_tokenizer, chats, expected_labels, quoting
from tests.forked import Outcome, forked
from tests.integration.axolotl_runs import base_yaml, in_this_process, load_cfg, run
from tests.models import make_llama, spelled_tokenizer

pytestmark = pytest.mark.axolotl

TURNS = {"target_length": 512, "rope": "linear", "sampler": "turns"}


def base_folder(folder: Path, template: str) -> Path:
    make_llama(eos_token_id=None).save_pretrained(folder / "base")
    chat_tokenizer(template).save_pretrained(folder / "base")
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return base_folder(tmp_path_factory.mktemp("chats"), "chatml")


def chat_yaml(home: Path, name: str, rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    folder = home / name
    folder.mkdir()
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"path": str(folder / "chats.jsonl"), "ds_type": "json", "type": "chat_template"}
    dataset |= changes.pop("dataset", {})
    return base_yaml(
        home,
        **{
            "datasets": [dataset],
            "pose": TURNS,
            "output_dir": str(folder / "out"),
            "dataset_prepared_path": str(folder / "prepared"),
            **changes,
        },
    )


def train(home: Path, name: str, rows: list[dict[str, Any]], **changes: Any) -> Outcome:
    return forked(run, chat_yaml(home, name, rows, **changes))


@pytest.mark.parametrize("packed", [False, True])
def test_jumps_stand_between_turns(home, packed):
    packing = {"sample_packing": True, "sequence_len": 128} if packed else {}
    # How far workers have fetched ahead when the training ends is a matter of time.
    done = train(home, f"turns {packed}", chats(), **packing, dataloader_num_workers=0)
    header = chat_tokenizer().convert_tokens_to_ids("<|im_start|>")
    documents = done.value.documents()
    jumps = 0
    for tokens, positions in documents:
        places = (np.flatnonzero(np.diff(positions) > 1) + 1).tolist()
        jumps += len(places)
        headers = [i for i, token in enumerate(tokens) if token == header and i]
        assert set(places) <= set(headers)
        assert len(headers) == 3 and positions[0] == 0 and positions[-1] < 512
    assert jumps > 0.8 * len(documents)
    assert len(documents) > sum(len(batch.tokens) for batch in done.value.of("train")) or not packed
    drawn, jumped = re.search(r"drew (\d+) documents .*, (\d+) of them with a jump", done.output).groups()
    assert drawn == jumped and len(documents) <= int(drawn) <= 12


def prepared(values: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of the rows as Axolotl hands them to the trainer."""
    from axolotl.common.datasets import load_datasets

    in_this_process()
    rows = load_datasets(cfg=load_cfg({**values, "shuffle_merged_datasets": False})).train_dataset
    return [(list(row["input_ids"]), list(row["labels"])) for row in rows]


def all_prepared(cases: dict[str, dict[str, Any]]) -> dict[str, list[tuple[list[int], list[int]]]]:
    return {name: prepared(values) for name, values in cases.items()}


@pytest.mark.parametrize("template", ["chatml", "inst"])
def test_text_that_quotes_the_template_keeps_its_labels(home, tmp_path, template):
    """Labels on each answer and the end of its turn and on nothing else, with what ends are trained as asked."""
    folder = home if template == "chatml" else base_folder(tmp_path, template)
    tokenizer = chat_tokenizer(template)
    ends = ("turn", "all", "last")
    rows = quoting()
    cases = {
        each: chat_yaml(folder, f"quoting {template} {each}", rows, dataset={"train_on_eos": each}) for each in ends
    }
    cases["roles"] = chat_yaml(folder, f"quoting {template} roles", rows, dataset={"roles_to_train": ["assistant"]})
    found = forked(all_prepared, cases).value
    expected = [expected_labels(tokenizer, row["messages"]) for row in rows]
    assert found["turn"] == found["roles"] == expected
    end = tokenizer.eos_token_id
    for (tokens, labels), (_, usual) in zip(found["last"], expected, strict=True):
        last = max(i for i, token in enumerate(tokens) if token == end)
        ended = [i for i in range(len(tokens) - 1) if usual[i] == end and usual[i + 1] == -100]
        assert labels == [-100 if i in ended and i != last else label for i, label in enumerate(usual)]
    for (tokens, labels), (_, usual) in zip(found["all"], expected, strict=True):
        more = [i for i, (label, before) in enumerate(zip(labels, usual, strict=True)) if label != before]
        assert all(tokens[i] == end and labels[i] == end for i in more)
        assert len(more) == (2 if template == "chatml" else 0), "the ends of two questions"


def test_rows_longer_than_the_window(home):
    """Axolotl drops them, or cuts them with their labels; what is then without any label is refused or named."""
    short, long, hopeless = chat(3, 3), chat(3, 30, 3, 30), chat(70, 3)
    rows = [short, long, hopeless]
    cases = {
        name: chat_yaml(home, f"long {name}", rows, excess_length_strategy=name, sequence_len=64)
        for name in ("drop", "truncate")
    }
    found = forked(all_prepared, cases).value
    tokenizer = chat_tokenizer()
    whole = [expected_labels(tokenizer, row["messages"]) for row in rows]
    assert found["drop"] == whole[:1]
    assert found["truncate"] == [tuple(part[:64] for part in row) for row in whole]
    assert set(found["truncate"][2][1]) == {-100}, "a row without any label is kept"
    for name, kept in found.items():
        plan = from_values({**cases[name], "max_steps": None})
        assert plan.rows == len(kept)
        assert [note[:37] for note in plan.notes] == ["about 2 of the 3 rows are not trained"] * (name == "drop")


def test_a_run_says_which_rows_train_nothing(home):
    rows = [*chats(6), chat(70, 3)]
    done = train(home, "said", rows, excess_length_strategy="truncate")
    assert "1 of 7 rows have no token in the loss and train nothing" in done.output
    assert "the first: row" in done.output and len(done.value.losses) == 2


def test_borders_in_every_chat_template_that_axolotl_has():
    """One between each two messages, behind what the first says and not behind where the second begins to speak."""
    import axolotl

    templates = sorted((Path(axolotl.__file__).parent / "utils" / "chat_templates" / "templates").glob("*.jinja"))
    special = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]",
               "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>")  # fmt: skip
    tokenizer = spelled_tokenizer(bos_token="<s>", eos_token="</s>", additional_special_tokens=list(special))
    said = ["What is a cat? Tell me.", "An animal.", "Thanks a lot!", "You are welcome."]
    chat_of = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    read = []
    for template in templates:
        tokenizer.chat_template = template.read_text()
        headers = turn_tokens(tokenizer)
        if headers is None:
            continue
        read.append(template.stem)
        text = tokenizer.apply_chat_template(chat_of, tokenize=False)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        begins = [text.rindex(each) for each in said]
        ends = [begin + len(each) for begin, each in zip(begins, said, strict=True)]
        spans = np.array(encoded["offset_mapping"])
        answers = np.zeros(len(spans), dtype=bool)
        for i in (1, 3):
            answers |= (spans[:, 0] >= begins[i]) & (spans[:, 1] <= ends[i])
        borders = turn_borders(np.array(encoded["input_ids"]), answers, headers)
        places = spans[borders, 0].tolist()
        assert len(places) == 3, template.stem
        for place, end, begin in zip(places, ends[:-1], begins[1:], strict=True):
            assert end <= place <= begin, template.stem
    assert len(read) > 30 and {"chatml", "llama3", "mistral_v1", "gemma3", "qwen3", "phi_35"} <= set(read)


@pytest.mark.parametrize("sampler", ["sentences", "cream"])
def test_other_samplers(home, sampler):
    """The tokenizer ends lines only, so a line is a sentence."""
    picker = random.Random(0)

    def line() -> str:
        return " ".join(f"w{picker.randrange(30, 100)}" for _ in range(picker.randrange(4, 9)))

    rows = [{"text": "\n".join(line() for _ in range(6))} for _ in range(8)]
    dataset = {"type": "completion", "field": "text"}
    pose = {"target_length": 512, "rope": "linear", "sampler": sampler}
    done = train(home, sampler, rows, dataset=dataset, pose=pose, sample_packing=True, sequence_len=128)
    newline = chat_tokenizer().convert_tokens_to_ids("\n")
    for tokens, positions in done.value.documents():
        places = (np.flatnonzero(np.diff(positions) > 1) + 1).tolist()
        if sampler == "sentences":
            ends = [i + 1 for i, token in enumerate(tokens[:-1]) if token == newline]
            assert set(places) <= set(ends) and len(places) >= 3
        else:
            assert positions[-1] == 511 and len(places) in (1, 2)
