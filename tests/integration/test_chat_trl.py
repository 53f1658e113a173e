"""Chats and sentences through the real TRL: where jumps stand and what is in the loss."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install trl")

from pose_plugin.training.data_report import look_at_rows
from tests.chat_data import chat, chat_tokenizer, chats, expected_labels, quoting
from tests.forked import forked
from tests.integration.trl_runs import Record
from tests.models import make_llama

# ChatML with answers and the ends of their turns marked for assistant_only_loss.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

USER = chat_tokenizer().convert_tokens_to_ids("user")


def sft(folder: Path, rows: list[dict[str, Any]], pose: dict[str, Any], template: str = MARKED, **config: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from pose_plugin import PoSECollator, extend_context

    model = make_llama(eos_token_id=None)
    model = type(model)(extend_context(model.config, target_length=512, rope="yarn"))
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    values = {
        "output_dir": str(folder / "out"),
        "max_steps": 1,
        "per_device_train_batch_size": 6,
        "max_length": 64,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "assistant_only_loss": True,
        **config,
    }
    return SFTTrainer(
        model,
        args=SFTConfig(**values),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        data_collator=PoSECollator(tokenizer, **{"target_length": 512, "train_length": 64, **pose}),
    )


def trained(*args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, int]]:
    trainer = sft(*args, **kwargs)
    record = Record(trainer.model)
    trainer.train()
    return [document for step in record.steps for document in step], trainer.data_collator.trained()


def jumps(positions: tuple[int, ...]) -> list[int]:
    return (np.flatnonzero(np.diff(positions) > 1) + 1).tolist()


@pytest.mark.parametrize(
    "config",
    [{}, {"packing": True, "packing_strategy": "bfd", "max_length": 128}, {"assistant_only_loss": False}],
    ids=["answers", "packed", "all in the loss"],
)
def test_turns(tmp_path, config):
    def case():
        return trained(tmp_path, chats(), {"sampler": "turns"}, **config)

    outcome = forked(case)
    documents, counts = outcome.value
    header = chat_tokenizer().convert_tokens_to_ids("<|im_start|>")
    seen = [jumps(positions) for _, positions in documents]
    for (tokens, _), places in zip(documents, seen, strict=True):
        headers = [i for i, token in enumerate(tokens) if token == header and i]
        assert len(headers) == 3 and set(places) <= set(headers)
    assert sum(map(bool, seen)) > 0.7 * len(seen)
    assert counts["anywhere"] == counts["uncut"] == 0 and counts["skipped"] > 0
    assert ("questions included" in outcome.output) == (config.get("assistant_only_loss") is False)


def test_prompts_and_completions_have_their_border(tmp_path):
    def case():
        rows = []
        for row in chats():
            question, answer = row["messages"][:2]
            rows.append({"prompt": [question], "completion": [answer]})
        return trained(tmp_path, rows, {"sampler": "turns"}, assistant_only_loss=False, completion_only_loss=True)

    documents, _ = forked(case).value
    ids = chat_tokenizer().convert_tokens_to_ids(["<|im_start|>", "assistant"])
    for tokens, positions in documents:
        answer = next(i for i in range(len(tokens)) if list(tokens[i : i + 2]) == ids)
        assert jumps(positions) in ([], [answer])


def test_labels_of_text_that_quotes_the_template_and_of_rows_that_are_too_long(tmp_path):
    """TRL marks answers by character, so quotes change nothing; it cuts long rows and drops what is left unlabelled."""

    def case():
        trainer = sft(tmp_path, [*quoting()[:4], chat(3, 30, 3, 30), chat(70, 3)], {"sampler": "turns"})
        return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]

    rows = forked(case).value
    tokenizer = chat_tokenizer()
    whole = [expected_labels(tokenizer, row["messages"]) for row in [*quoting()[:4], chat(3, 30, 3, 30)]]
    assert rows == [tuple(part[:64] for part in row) for row in whole]


# transformers 5.16 and 5.20 get two kinds of answers wrong, 5.24 gets them right: what is wrong is found.
def test_a_mask_that_runs_on_is_found_before_the_first_step(tmp_path):
    """Where {% generation %} ends in a blank, all that follows counts as the answer."""
    running = MARKED.replace("'<|im_end|>' }}{% endgeneration %}{{ '\n' }}", "'<|im_end|> ' }}{% endgeneration %}")
    assert running != MARKED

    def case():
        trainer = sft(tmp_path, chats(), {}, template=running)
        trainer.train()
        rows = list(trainer.train_dataset)
        # The first question after an answer.
        return [row["labels"][row["input_ids"].index(USER, 3)] != -100 for row in rows]

    outcome = forked(case)
    wrong = sum(outcome.value)
    assert wrong in (0, 12)
    assert ("12 of 12 rows have the header of a turn in the loss" in outcome.output) == bool(wrong)


def test_an_answer_that_falls_out_of_the_loss_is_found(tmp_path):
    """An answer that begins with a blank which is no token ends the search for answers: the rest is not trained."""
    rows = chats()
    rows[5] = {"messages": [dict(message) for message in chat(3, 3, 3, 3)["messages"]]}
    rows[5]["messages"][3]["content"] = " w41 w42"

    def case():
        trainer = sft(tmp_path, rows, {})
        report = look_at_rows(trainer.train_dataset, trainer.data_collator)
        return trainer.train_dataset[5]["labels"][-5:], report.warnings(trainer.data_collator.settings)

    labels, said = forked(case).value
    assert len(said) == (1 if set(labels) == {-100} else 0)
    for warning in said:
        assert "1 of 12 rows have an answer in the loss and a later one that is not" in warning
        assert "the first: row 5, which begins" in warning


def test_sentences(tmp_path):
    """The tokenizer ends lines only: a sentence is a line here."""
    picker = random.Random(0)

    def line() -> str:
        return " ".join(f"w{picker.randrange(30, 100)}" for _ in range(picker.randrange(4, 9)))

    rows = [{"text": "\n".join(line() for _ in range(6))} for _ in range(8)]

    def case():
        return trained(tmp_path, rows, {"sampler": "sentences"}, template=None, assistant_only_loss=False)

    newline = chat_tokenizer().convert_tokens_to_ids("\n")
    documents, counts = forked(case).value
    for tokens, positions in documents:
        ends = [i + 1 for i, token in enumerate(tokens[:-1]) if token == newline]
        assert set(jumps(positions)) <= set(ends) and len(jumps(positions)) >= 3
    assert counts["anywhere"] == 0
