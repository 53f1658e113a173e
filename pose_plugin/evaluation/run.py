"""One `pose-plugin evaluate`: what is missing is measured piece by piece and kept on disk, the rest is read there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pose_plugin._version import __version__
from pose_plugin.checkpoints.load import Source, load, place
from pose_plugin.evaluation.cost import duration, estimates
from pose_plugin.evaluation.finished import Finished, weights_of
from pose_plugin.evaluation.measures.longppl import KeyTokens, require_same_tokens
from pose_plugin.evaluation.memory import TooLittleMemory, fitting, require_room
from pose_plugin.evaluation.model import device_of
from pose_plugin.evaluation.results import ModelResult
from pose_plugin.evaluation.tasks import TASKS, Plan, find_keys, longppl_lengths
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.log import log


class Session:
    """Runs a plan on models.

    Args:
        plan: what is measured.
        tasks: names out of TASKS.
        output: folder that keeps what is finished.
        dtype: as `load` takes it.
        device: as `load` takes it.
        fresh: measure anew what the folder holds.

    Attributes:
        left_out: (model, or None for all, task, length, why) of what did not fit in memory or could not be measured.
    """

    def __init__(
        self, plan: Plan, tasks: Sequence[str], output: Path, dtype: str, device: str | None, fresh: bool = False
    ) -> None:
        self.plan, self.tasks = plan, list(tasks)
        self.dtype, self.device = dtype, device
        self.finished = Finished(output, fresh)
        self._asked = False
        self._first, self._tokens = "", dict[str, str]()
        self.left_out: list[tuple[str | None, str, int, str]] = []

    def check(self, sources: Sequence[Source], evaluator: Source | None) -> None:
        """Checks everything that can be checked without weights.

        Raises:
            PoSEError: naming the option, its value and the way out.
        """
        for source in sources:
            require_room(source.config, min(self.plan.lengths), place(self.device))
            for name in self.tasks:
                TASKS[name].check(source, self.plan)
        self._first = sources[0].name
        self._tokens = {source.name: self.plan.tokens(source) for source in sources}
        if evaluator is None:
            return
        self.plan.evaluator = evaluator.name
        for source in sources:
            require_same_tokens(evaluator.tokenizer, source.tokenizer, self.plan.texts, evaluator.name, source.name)

    def forecast(self, sources: Sequence[Source]) -> str:
        """How long everything that is missing will take, and how much memory."""
        parts = []
        for source in sources:
            missing = self._missing(source)
            model = load(source, self.dtype, self.device) if missing else None
            parts.append(f"{source.name}\n{self._forecast(model, source, missing)}")
            del model
        return "\n\n".join(parts)

    def find_keys(self, evaluator: Source) -> None:
        """Asks the evaluator for the key tokens of every length, or reads what it said before."""
        model, self._asked = None, True
        for n in longppl_lengths(self.plan):
            what = self._what(evaluator, "keys", n)
            kept = _readable(_keys, self.finished.get(**what))
            if kept is None:
                if model is None:
                    print(f"key tokens by {evaluator.name}", flush=True)
                    model = load(evaluator, self.dtype, self.device)
                try:
                    kept = find_keys(model, evaluator, self.plan, n)
                except Exception as error:
                    why = PoSEError(f"the evaluator {evaluator.name}: {_foreseen(error, evaluator, n)}")
                    self._leave_out(None, "longppl", n, why)
                    if isinstance(error, TooLittleMemory):
                        # Longer ones need more.
                        break
                    continue
                self.finished.put(asdict(kept), **what)
            self.plan.keys[n] = kept

    def results(self, source: Source) -> Iterator[ModelResult]:
        """The model's row, again after each task, and fuller each time."""
        missing = self._missing(source)
        row = ModelResult(source.name, facts=source.facts, tokens=self._tokens[source.name])
        if not missing:
            print("  all of it is there already", flush=True)
        model = None
        if missing:
            try:
                model = load(source, self.dtype, self.device)
                print(self._forecast(model, source, missing), flush=True)
            except PoSEError as error:
                if len(self._tokens) == 1:
                    raise
                # The other models are worth their own results.
                self._leave_out(source.name, ", ".join(dict.fromkeys(name for name, _ in missing)), 0, error)
                model = None
        for name in self.tasks:
            task, parts = TASKS[name], []
            for n in self._pieces(name):
                kept = self._kept(source, name, n)
                if kept is not None:
                    parts.append(kept)
                    continue
                if model is None:
                    continue
                try:
                    if n:
                        # Before a million prompts are made that no memory could read.
                        fitting(model, device_of(model), n, 1)
                    part = task.run(model, source, self.plan, n)
                except Exception as error:
                    # Too little memory, no key token, a task of lm-eval whose data is not here, positions that end
                    # before n: the rest goes on.
                    self._leave_out(source.name, name, n, _foreseen(error, source, n))
                    if torch.cuda.is_available():
                        torch.cuda.empty_cache()
                    if isinstance(error, TooLittleMemory):
                        # Longer ones need more.
                        break
                    continue
                self.finished.put(part.to_dict(), **self._what(source, name, n))
                parts.append(part)
            if parts:
                setattr(row, name, task.joined(parts))
            yield row
        del model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def notes(self, source: Source) -> list[str]:
        """What did not fit and what cannot be compared, for the report."""
        notes = [
            f"{task}{f' at {n}' if n else ''} was left out: {why}"
            for who, task, n, why in self.left_out
            if who in (None, source.name)
        ]
        if self._tokens[source.name] != self._tokens[self._first]:
            notes.append(
                f"its tokenizer makes other tokens of the texts than that of {self._first}, so its losses by token "
                "cannot be compared and do not count for the best; give it its own --output to compare it with its kind"
            )
        return notes

    def _leave_out(self, who: str | None, task: str, n: int, error: PoSEError) -> None:
        print(f"  {task}{f' at {n}' if n else ''} is left out: {error}", flush=True)
        longer = "; longer ones were not tried" if n and isinstance(error, TooLittleMemory) else ""
        self.left_out.append((who, task, n, f"{error}{longer}"))

    def _pieces(self, name: str) -> list[int]:
        pieces = TASKS[name].pieces(self.plan)
        # Before the evaluator has been asked, for a forecast, all of them.
        return [n for n in pieces if n in self.plan.keys] if name == "longppl" and self._asked else pieces

    def _missing(self, source: Source) -> list[tuple[str, int]]:
        return [(name, n) for name in self.tasks for n in self._pieces(name) if self._kept(source, name, n) is None]

    def _kept(self, source: Source, name: str, n: int) -> Any | None:
        return _readable(TASKS[name].result.from_dict, self.finished.get(**self._what(source, name, n)))

    def _what(self, source: Source, task: str, length: int) -> dict[str, Any]:
        depends = TASKS["longppl" if task == "keys" else task].depends(self.plan)
        if task == "keys":
            depends.pop("keys")
        elif task == "longppl":
            depends["evaluator"] = self.plan.evaluator
        return {
            "name": source.name,
            "task": task,
            "length": length,
            "weights": [weights_of(source.base), source.revision, weights_of(source.path)],
            "config": source.config.to_dict(),
            "dtype": self.dtype,
            # Another version may ask otherwise.
            "version": __version__,
            **depends,
        }

    def _forecast(self, model: Any, source: Source, missing: Sequence[tuple[str, int]]) -> str:
        if model is None:
            return "  all of it is there already"
        works = [TASKS[name].work(source, self.plan, n) for name, n in missing]
        try:
            found = estimates(model, [work for work in works if work.sequences], self.plan.batch_size)
        except PoSEError:
            raise
        except Exception as error:
            said = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise PoSEError(
                f"{source.path} was loaded, but cannot run on {device_of(model)}: {said}. Name another --device or "
                "--dtype"
            ) from error
        seconds = [estimate.seconds for estimate in found if estimate.seconds is not None]
        lines = [f"  {estimate.line()}" for estimate in found]
        lines += [f"  {work.task:<11} by lm-eval, not estimated" for work in works if not work.sequences]
        return "\n".join([*lines, f"  together about {duration(sum(seconds))}"])


def _keys(data: dict[str, Any]) -> KeyTokens:
    return KeyTokens(**{**data, "positions": tuple(map(tuple, data["positions"]))})


def _readable(read: Callable[[Any], Any], kept: Any | None) -> Any | None:
    """What was kept, or None where that is nothing which can be read: it is measured anew."""
    try:
        return None if kept is None else read(kept)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return None


def _foreseen(error: Exception, source: Source, n: int) -> PoSEError:
    """The error itself, or what a model's own code has raised, in a sentence; its traceback goes to the log."""
    if isinstance(error, PoSEError):
        return error
    log.warning("%s failed at %d tokens", source.name, n, exc_info=error)
    beyond = source.maximum is not None and n > source.maximum
    hint = f"; its positions may end at max_position_embeddings={source.maximum}" if beyond else ""
    return PoSEError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{hint}")
