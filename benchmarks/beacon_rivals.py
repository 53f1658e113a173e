"""Compare beacons with other ways to keep a text in a small cache: the same texts, the same number of rows.

    OMP_NUM_THREADS=1 python benchmarks/beacon_rivals.py                       # beacons, cut text, PEFT's Cartridge
    VENV/bin/python benchmarks/beacon_rivals.py --kvpress                      # then the rows of kvpress
    python benchmarks/beacon_rivals.py --quick --output /tmp/rivals            # only checks that it runs

kvpress 0.5.5 needs transformers below 5.3, so it gets its own environment: `python -m venv VENV`, then
`VENV/bin/pip install kvpress==0.5.5`. Each command adds its rows to results/beacon_rivals.json.

The model is the quick start's, with a window of 128. Each text has 513 tokens, eight intervals and one token, so that
beacons leave 512/ratio + 1 rows per layer. Every other reader keeps exactly as many. The rest of the document, at most
63 tokens, is then read behind them, in both kinds of documents of beacon_judging.py.

- beacons: trained on both kinds (the part `mixed` of beacon_learning.py).
- first 4 and last tokens: the text without its middle, read again.
- Cartridge: keys and values of the first tokens, then trained on random pieces of this one text.
- StreamingLLM, with keys moved to adjacent positions, and SnapKV: kvpress. They first read the whole text, and the
  window is too short for that. Untrained YaRN extends it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import about, arguments, machine, markdown, places, save
from torch.nn import functional as F

BASE = Path(__file__).parent.parent / "example_configs" / "quickstart" / "base"
WINDOW, INTERVAL, CONTEXT, REST = 128, 64, 513, 48
RATIOS, SINKS, SEED = (8, 16, 32, 64), 4, 10
QUESTIONS, TEXTS = 100, 32
# Training one Cartridge per document is slow, so it gets fewer documents.
CARTRIDGES, CARTRIDGE_STEPS, CARTRIDGE_ROWS, CARTRIDGE_RATE = 16, 60, 8, 2e-2
# From (text, (1, tokens); rows to keep) to a function from the rest of the document to its logits.
Reader = Callable[[torch.Tensor, int], Callable[[torch.Tensor], torch.Tensor]]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kvpress", action="store_true", help="the rows of kvpress, in its own environment")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results, folder = places(args.output)[0], args.output or Path("outputs/beacon_rivals")
    folder.mkdir(parents=True, exist_ok=True)
    path, documents = results / "beacon_rivals.json", folder / "documents.json"
    if not documents.exists():
        documents.write_text(json.dumps(drawn(*((2, 2) if args.quick else (QUESTIONS, TEXTS)))))
    result = json.loads(path.read_text()) if path.exists() else {"readers": {}, "machine": {}}
    ratios = RATIOS[:1] if args.quick else RATIOS
    readers = pressed() if args.kvpress else own(folder, args.quick)
    for name, reader in readers:
        limit = (1 if args.quick else CARTRIDGES) if name == "Cartridge" else None
        found = {str(ratio): judged(reader, json.loads(documents.read_text()), ratio, limit) for ratio in ratios}
        result["readers"][name] = found
        print(name, found, flush=True)
        facts = machine("torch", "transformers", "kvpress" if args.kvpress else "peft")
        if args.kvpress:  # its transformers is another one
            facts = {"kvpress": f"{facts['kvpress']} (transformers {facts['transformers']})"}
        result["machine"] |= facts
        save(result, path)
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """Return digits found and loss of the rest of library texts, by reader and ratio."""
    ratios = list(next(iter(result["readers"].values())))
    header = ["", *(f"digit found, {ratio}" for ratio in ratios), *(f"nats, {ratio}" for ratio in ratios)]
    rows = [
        [name, *(f"{found[r]['digit']:.2f}" for r in ratios), *(f"{found[r]['text']:.3f}" for r in ratios)]
        for name, found in result["readers"].items()
    ]
    return markdown(header, rows) + "\n\n" + about(result["machine"])


def drawn(questions: int, texts: int) -> dict[str, list[list[int]]]:
    """Draw documents that end in a question, and library texts."""
    from beacon_training import Data

    data, rng = Data(judging=True), random.Random(SEED)
    return {
        "digit": [data.question(CONTEXT + REST, rng) for _ in range(questions)],
        "text": [data.text(CONTEXT + INTERVAL - 1, rng) for _ in range(texts)],
    }


def judged(reader: Reader, documents: dict[str, Any], ratio: int, limit: int | None) -> dict[str, Any]:
    """Return the share of digits found and the mean loss of library texts behind a text of few rows."""
    rows = (CONTEXT - 1) // ratio + 1
    hits, losses = [], []
    for kind, each in documents.items():
        for document in each[:limit]:
            ids = torch.tensor([document])
            rest = ids[:, CONTEXT:]
            logits = reader(ids[:, :CONTEXT], rows)(rest).float()
            if kind == "digit":  # followed by the end of the text
                hits.append(float(logits[0, -3].argmax() == rest[0, -2]))
            else:
                losses.append(float(F.cross_entropy(logits[0, :-1], rest[0, 1:])))
    counts = {"questions": len(hits), "texts": len(losses), "rows": rows}
    return {"digit": round(sum(hits) / len(hits), 4), "text": round(sum(losses) / len(losses), 4)} | counts


def base(**changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(BASE, **changes).eval()


def own(folder: Path, quick: bool) -> Iterator[tuple[str, Reader]]:
    yield "beacons", beacons(folder / "adapter", quick)
    yield "first 4 and last tokens", cut(base())
    yield "Cartridge", cartridge(2 if quick else CARTRIDGE_STEPS)


def beacons(folder: Path, quick: bool) -> Reader:
    import beacon_training as training
    from peft import PeftModel

    if not folder.exists():
        steps, tokens = (2, 512) if quick else (training.KINDS["mixed"], training.STEP_TOKENS)
        training.beacons(steps, SEED, tokens, "mixed")[0].save_pretrained(str(folder))
    model: Any = PeftModel.from_pretrained(base(), str(folder)).eval()

    def read(text: torch.Tensor, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
        cache = model.condense(text, ratio=(CONTEXT - 1) // (rows - 1))
        assert cache.len_memory + cache.len_tail == rows

        def rest(ids: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return model(ids, past_key_values=cache, ratio=2).logits  # nothing more is condensed

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


def cartridge(steps: int) -> Reader:
    """Train a PEFT Cartridge for each text with a language-model loss on the text itself."""
    from peft import CartridgeConfig, get_peft_model, initialize_kv_prefix_from_past_key_values

    def read(text: torch.Tensor, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
        plain = base()
        with torch.no_grad():
            output = plain(input_ids=text[:, :rows], use_cache=True)
        model: Any = get_peft_model(plain, CartridgeConfig(task_type="CAUSAL_LM", num_virtual_tokens=rows))
        past = output.get("past_key_values", output.get("cache"))
        initialize_kv_prefix_from_past_key_values(model, past_key_values=past, num_virtual_tokens=rows)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer, rng = torch.optim.AdamW(trained, lr=CARTRIDGE_RATE, weight_decay=0.0), random.Random(SEED)
        length = min(INTERVAL, WINDOW - rows)
        for step in range(steps):
            starts = [rng.randrange(CONTEXT - length) for _ in range(CARTRIDGE_ROWS)]
            ids = torch.cat([text[:, at : at + length] for at in starts])
            logits = model(input_ids=ids).logits[:, -length:]
            F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            for group in optimizer.param_groups:
                group["lr"] = CARTRIDGE_RATE * (1 - step / steps)
            optimizer.step()
            optimizer.zero_grad()

        def rest(ids: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return model(input_ids=ids).logits[:, -ids.shape[1] :]

        return rest

    return read


def pressed() -> Iterator[tuple[str, Reader]]:
    from kvpress import KeyRerotationPress, SnapKVPress, StreamingLLMPress
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(BASE)
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": WINDOW}
    config.rope_parameters = {**config.rope_parameters, **yarn}
    config.max_position_embeddings = 8 * WINDOW
    longer = base(config=config)
    yield "StreamingLLM", press(base(), lambda share, _: KeyRerotationPress(StreamingLLMPress(share, n_sink=SINKS)))
    yield "SnapKV, YaRN", press(longer, lambda share, rows: SnapKVPress(share, window_size=min(16, rows // 2)))
    yield "everything kept, YaRN", press(longer, None)


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
