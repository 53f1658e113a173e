"""Compare beacons with other ways to keep a text in a small cache: the same texts, the same number of rows.

    OMP_NUM_THREADS=1 python benchmarks/beacon_rivals.py                       # beacons, cut text, PEFT's Cartridge
    VENV/bin/python benchmarks/beacon_rivals.py --kvpress                      # then the rows of kvpress
    OMP_NUM_THREADS=1 python benchmarks/beacon_rivals.py --smollm2             # both again on SmolLM2-135M
    VENV/bin/python benchmarks/beacon_rivals.py --smollm2 --kvpress
    python benchmarks/beacon_rivals.py --quick --output /tmp/rivals            # only checks that it runs

kvpress 0.5.5 needs transformers below 5.3, so it gets its own environment: `python -m venv VENV`, then
`VENV/bin/pip install kvpress==0.5.5`. Each command adds its rows to results/beacon_rivals.json.

Each text is eight intervals and one token long, so beacons leave (length - 1) / ratio + 1 rows per layer. Every other
reader keeps exactly as many. The rest of the document, at most one interval, is then read behind them. It is a question
about a fact in the text, or the text goes on.

- The quick start's model, with a window of 128 and intervals of 64: the documents of beacon_judging.py. Beacons are
  trained on both kinds (the part `mixed` of beacon_learning.py).
- SmolLM2-135M, with a window of 512 and intervals of 128: the texts of beacon_smollm2.py, and short haystacks with
  three facts. Its beacons are those of `beacon_smollm2.py train --kept`, which have read plays only and never a
  question. They also keep 36 raw rows (the first 4 tokens and the last 32), so all readers get 36 more.

The readers:

- beacons.
- first 4 and last tokens: the text without its middle, read again.
- Cartridge: keys and values of the first tokens, then trained on random pieces of this one text.
- StreamingLLM, with keys moved to adjacent positions, and SnapKV: kvpress. They first read the whole text. The tiny
  model's window is too short for that, so untrained YaRN extends it for SnapKV. kvpress cannot move YaRN's keys.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import about, arguments, machine, markdown, places, save
from torch.nn import functional as F

TINY = Path(__file__).parent.parent / "example_configs" / "quickstart" / "base"
SINKS, SEED, EVERYTHING = 4, 10, "everything kept"
CARTRIDGE_RATE = 2e-2
# From (text, (1, tokens); rows to keep) to a function from the rest of the document to its logits.
Reader = Callable[[torch.Tensor, int], Callable[[torch.Tensor], torch.Tensor]]


@dataclass(frozen=True)
class Setting:
    """A model, its geometry, and how much is measured.

    Training one Cartridge per text is slow, so it gets fewer documents of each kind (`cartridges`). Each of its `steps`
    reads `batch` pieces of the text.
    """

    name: str
    window: int
    interval: int
    ratios: tuple[int, ...]
    questions: int
    texts: int
    cartridges: int
    steps: int
    batch: int
    raw: int = 0  # rows that beacons keep uncondensed

    @property
    def context(self) -> int:
        return 8 * self.interval + 1

    def rows(self, ratio: int) -> int:
        """Return the rows per layer that each reader keeps of a text."""
        return (self.context - 1) // ratio + 1 + self.raw

    def ratio(self, rows: int) -> int:
        return (self.context - 1) // (rows - 1 - self.raw)


SETTINGS = (
    Setting("tiny", 128, 64, (8, 16, 32, 64), questions=100, texts=32, cartridges=16, steps=60, batch=8),
    Setting("SmolLM2-135M", 512, 128, (4, 8, 16), questions=12, texts=12, cartridges=3, steps=20, batch=2, raw=36),
)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M instead of the tiny model")
    parser.add_argument("--kvpress", action="store_true", help="the rows of kvpress, in its own environment")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results, folder = places(args.output)[0], args.output or Path("outputs/beacon_rivals")
    setting = SETTINGS[args.smollm2]
    folder.mkdir(parents=True, exist_ok=True)
    path, documents = results / "beacon_rivals.json", folder / f"documents-{setting.name}.json"
    if not documents.exists():
        drawn = smollm2_documents(setting) if args.smollm2 else tiny_documents(setting, args.quick)
        documents.write_text(json.dumps(drawn))
    result = json.loads(path.read_text()) if path.exists() else {}
    result.setdefault(setting.name, {"readers": {}, "machine": {}})
    mine, ratios = result[setting.name], setting.ratios[:1] if args.quick else setting.ratios
    readers = pressed(setting) if args.kvpress else own(setting, folder, args.quick)
    for name, reader in readers:
        limit = (1 if args.quick else setting.cartridges) if name == "Cartridge" else None
        for ratio in ratios:
            if str(ratio) in mine["readers"].get(name, {}):  # an interrupted run goes on
                continue
            rows = mine["readers"].setdefault(name, {})
            whole = next(iter(rows.values()), None) if name.startswith(EVERYTHING) else None
            found = whole or judged(reader, json.loads(documents.read_text()), setting, ratio, limit)
            if name.startswith(EVERYTHING):
                found["rows"] = setting.context
            rows[str(ratio)] = found
            print(name, ratio, found, flush=True)
            mine["machine"] |= facts(args.kvpress)
            save(result, path)
    print(table(result))


def facts(kvpress: bool) -> dict[str, str]:
    """Return what measured: kvpress has another transformers than the other rows."""
    found = machine("torch", "transformers", "kvpress" if kvpress else "peft")
    return {"kvpress": f"{found['kvpress']} (transformers {found['transformers']})"} if kvpress else found


def table(result: dict[str, Any]) -> str:
    """Return a table for each model: facts found and loss of texts that go on, by reader and ratio."""
    made = []
    for name, mine in result.items():
        ratios = list(next(iter(mine["readers"].values())))
        header = [name, *(f"found, {ratio}x" for ratio in ratios), *(f"nats, {ratio}x" for ratio in ratios)]
        rows = [
            [
                reader,
                *(f"{found[r]['found']:.2f}" if r in found else "" for r in ratios),
                *(f"{found[r]['text']:.3f}" if r in found else "" for r in ratios),
            ]
            for reader, found in mine["readers"].items()
        ]
        made.append(markdown(header, rows) + "\n\n" + about(mine["machine"]))
    return "\n\n".join(made)


def document(ids: list[int], answer: int = 0, behind: int = 0) -> dict[str, Any]:
    """Return a document, and how many tokens its answer has and how many are behind it; 0 if it is a text."""
    return {"ids": ids, "answer": answer, "behind": behind}


def tiny_documents(setting: Setting, quick: bool) -> dict[str, list[Any]]:
    """Draw documents that end in a question with one digit as the answer, and library texts."""
    from beacon_training import Data

    data, rng = Data(judging=True), random.Random(SEED)
    questions, texts = (2, 2) if quick else (setting.questions, setting.texts)
    return {
        "found": [document(data.question(setting.context + 48, rng), 1, 1) for _ in range(questions)],
        "text": [document(data.text(setting.context + setting.interval - 1, rng)) for _ in range(texts)],
    }


def smollm2_documents(setting: Setting) -> dict[str, list[Any]]:
    """Draw short haystacks with three facts, each asked for alone, and pieces of the judged texts."""
    from recall import texts
    from recall.settings import WORDING

    from pose_plugin.evaluation.measures.haystack import build, filled

    tokenizer, rng, questions, pieces = smollm2()[1], random.Random(SEED), [], []
    found, longest = [texts.ids(tokenizer, name) for name in texts.JUDGED], setting.context + setting.interval - 1
    while len(questions) < setting.questions:
        number = len(questions) // 3
        filler = found[number % len(found)][number * 2000 :]
        haystack = build(tokenizer, WORDING, filler, setting.context, 3, number)
        for fact in haystack.facts:
            asked = tokenizer(filled(WORDING.question, fact.name), add_special_tokens=False)["input_ids"]
            answer = tokenizer(" " + fact.key, add_special_tokens=False)["input_ids"]
            questions.append(document([*haystack.ids, *asked, *answer], len(answer)))
    for number in range(setting.texts):
        ids = found[number % len(found)]
        start = rng.randrange(len(ids) - longest)
        pieces.append(document(ids[start : start + longest]))
    return {"found": questions, "text": pieces}


def judged(reader: Reader, documents: dict[str, Any], setting: Setting, ratio: int, limit: int | None) -> Any:
    """Return the share of facts found and the mean loss of texts, both behind a text of few rows."""
    rows = setting.rows(ratio)
    hits, losses = [], []
    for kind, each in documents.items():
        for given in each[:limit]:
            ids = torch.tensor([given["ids"]])
            rest = ids[:, setting.context :]
            logits = reader(ids[:, : setting.context], rows)(rest).float()
            if kind == "found":
                end = rest.shape[1] - given["behind"]
                answer = slice(end - given["answer"], end)
                guessed = logits[0, answer.start - 1 : answer.stop - 1].argmax(-1)
                hits.append(bool((guessed == rest[0, answer]).all()))
            else:
                losses.append(float(F.cross_entropy(logits[0, :-1], rest[0, 1:])))
    counts = {"questions": len(hits), "texts": len(losses), "rows": rows}
    return {"found": round(sum(hits) / len(hits), 4), "text": round(sum(losses) / len(losses), 4)} | counts


def base(setting: Setting, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    if setting.name != "tiny":
        return smollm2()[0]
    return AutoModelForCausalLM.from_pretrained(TINY, **changes).eval()


def smollm2() -> tuple[Any, Any]:
    """Load the model in bf16 and its tokenizer; beacon_smollm2.py has fetched them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path("outputs/smollm2/model")
    if not folder.exists():
        raise SystemExit(f"{folder} is missing: first run benchmarks/beacon_smollm2.py train")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def own(setting: Setting, folder: Path, quick: bool) -> Iterator[tuple[str, Reader]]:
    yield "beacons", beacons(setting, folder / "adapter", quick)
    yield f"first {SINKS} and last tokens", cut(base(setting))
    yield "Cartridge", cartridge(setting, 2 if quick else setting.steps)


def beacons(setting: Setting, folder: Path, quick: bool) -> Reader:
    import beacon_training as training
    from peft import PeftModel

    if setting.name != "tiny":
        import beacon_smollm2

        model: Any = beacon_smollm2.restored(Path("outputs/beacon_smollm2/kept"), False, beacon_smollm2.KEPT)[0]
    else:
        if not folder.exists():
            steps, tokens = (2, 512) if quick else (training.KINDS["mixed"], training.STEP_TOKENS)
            training.beacons(steps, SEED, tokens, "mixed")[0].save_pretrained(str(folder))
        model = PeftModel.from_pretrained(base(setting), str(folder)).eval()

    def read(text: torch.Tensor, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
        memory = model.condense(text, ratio=setting.ratio(rows))
        assert memory.len_memory + memory.len_overlap + memory.len_tail == rows

        def rest(ids: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return model(ids, past_key_values=memory, ratio=2).logits  # nothing more is condensed

        return rest

    return read


def cut(model: Any) -> Reader:
    def read(text: torch.Tensor, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
        kept = torch.cat([text[:, :SINKS], text[:, SINKS - rows :]], dim=1)
        assert kept.shape[1] == rows

        def rest(ids: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return model(input_ids=torch.cat([kept, ids], dim=1)).logits[:, rows:]

        return rest

    return read


def cartridge(setting: Setting, steps: int) -> Reader:
    """Train a PEFT Cartridge for each text with a language-model loss on the text itself."""
    from peft import CartridgeConfig, get_peft_model, initialize_kv_prefix_from_past_key_values

    @cache
    def trained(text: tuple[int, ...], rows: int) -> Any:
        plain, whole = base(setting), torch.tensor([text])
        with torch.no_grad():
            output = plain(input_ids=whole[:, :rows], use_cache=True)
        model: Any = get_peft_model(plain, CartridgeConfig(task_type="CAUSAL_LM", num_virtual_tokens=rows))
        past = output.get("past_key_values", output.get("cache"))
        initialize_kv_prefix_from_past_key_values(model, past_key_values=past, num_virtual_tokens=rows)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=CARTRIDGE_RATE, weight_decay=0.0)
        length, rng = min(setting.interval, setting.window - rows), random.Random(SEED)
        for step in range(steps):
            starts = [rng.randrange(setting.context - length) for _ in range(setting.batch)]
            ids = torch.cat([whole[:, at : at + length] for at in starts])
            logits = model(input_ids=ids).logits[:, -length:].float()
            F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            for group in optimizer.param_groups:
                group["lr"] = CARTRIDGE_RATE * (1 - step / steps)
            optimizer.step()
            optimizer.zero_grad()
        return model

    def read(text: torch.Tensor, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
        model = trained(tuple(text[0].tolist()), rows)

        def rest(ids: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return model(input_ids=ids).logits[:, -ids.shape[1] :]

        return rest

    return read


def pressed(setting: Setting) -> Iterator[tuple[str, Reader]]:
    from kvpress import KeyRerotationPress, SnapKVPress, StreamingLLMPress
    from transformers import AutoConfig

    model, longer, note = base(setting), base(setting), ""
    if setting.name == "tiny":
        config = AutoConfig.from_pretrained(TINY)
        yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": setting.window}
        config.rope_parameters = {**config.rope_parameters, **yarn}
        config.max_position_embeddings = 8 * setting.window
        longer, note = base(setting, config=config), ", YaRN"
    yield "StreamingLLM", press(model, lambda share, _: KeyRerotationPress(StreamingLLMPress(share, n_sink=SINKS)))
    yield f"SnapKV{note}", press(longer, lambda share, rows: SnapKVPress(share, window_size=min(16, rows // 2)))
    yield f"{EVERYTHING}{note}", press(longer, None)


def press(model: Any, make: Callable[[float, int], Any] | None) -> Reader:
    """Read the text with one of kvpress's methods; without one, all rows are kept."""
    from transformers import DynamicCache

    def read(text: torch.Tensor, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
        length, past = text.shape[1], DynamicCache()
        with torch.no_grad():
            if make is None:
                model(input_ids=text, past_key_values=past)
            else:
                # Half a row more, since kvpress rounds down.
                with make(1 - (rows + 0.5) / length, rows)(model):
                    model(input_ids=text, past_key_values=past)
        kept = past.get_seq_length()
        assert make is None or kept == rows
        # As in kvpress's own pipeline: keys that were moved continue at the next position, others where they were.
        moved = make is not None and hasattr(make(0.5, rows), "press")

        def rest(ids: torch.Tensor) -> torch.Tensor:
            first = kept if moved else length
            places = torch.arange(first, first + ids.shape[1])[None]
            with torch.no_grad():
                return model(input_ids=ids, past_key_values=past, position_ids=places).logits

        return rest

    return read


if __name__ == "__main__":
    main()
