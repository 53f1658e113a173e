"""Chats through the real Axolotl: where jumps stand, what is in the loss, what happens to rows that are too long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")

from tests.chat_data import chat_tokenizer, chats
from tests.conftest import make_llama
from tests.forked import Outcome, forked
from tests.integration.axolotl_runs import base_yaml, import_axolotl, run

pytestmark = pytest.mark.axolotl

TURNS = {"target_length": 512, "rope": "linear", "sampler": "turns"}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    import_axolotl()
    folder = tmp_path_factory.mktemp("chats")
    make_llama(eos_token_id=None).save_pretrained(folder / "base")
    chat_tokenizer().save_pretrained(folder / "base")
    return folder


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
    done = train(home, f"turns {packed}", chats(), **packing)
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
    assert "12 of them with a jump" in done.output
