"""Run `pose-plugin evaluate`. Each result is kept in finished.jsonl, so that an interrupted run resumes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pose_plugin.checkpoints.load import Source, kind_of, load, place
from pose_plugin.evaluation.asking import Asking
from pose_plugin.evaluation.kept import Kept
from pose_plugin.evaluation.left_out import AllLeftOut, LeftOut
from pose_plugin.evaluation.measure import Measure, Windows, prepare_where_possible, require_same_tokens, tokens_of
from pose_plugin.evaluation.memory import TooLittleMemory, forecast, require_fits, require_room
from pose_plugin.evaluation.model import device_of
from pose_plugin.evaluation.questions import Answers, groups, unanswered
from pose_plugin.evaluation.ranks import Ranks
from pose_plugin.evaluation.results import ModelResult, Result, Work, joined
from pose_plugin.evaluation.served import ServedModel, ServedSource, cost
from pose_plugin.utils.errors import Complaints, PoSEError, first_line
from pose_plugin.utils.journal import digest
from pose_plugin.utils.log import log
from pose_plugin.utils.server import ServerGoneError
from pose_plugin.utils.tables import counted


class Session:
    """Measures models, and keeps what is finished in a folder.

    Args:
        dtype, device: as `load` takes them.
        fresh: ignore what the folder holds.
        where_possible: leave out lengths that a measure cannot be measured at, or that do not fit in memory. Else the
            first is an error, and the second counts as a failure.
    """

    def __init__(
        self,
        measures: Sequence[Measure],
        lengths: Sequence[int],
        output: Path,
        dtype: str,
        device: str | None,
        fresh: bool = False,
        where_possible: bool = False,
    ) -> None:
        self.measures, self.lengths = measures, list(lengths)
        self.ranks = Ranks()
        self.dtype, self.device = dtype, device or self.ranks.device()
        self.kept = Kept(output, dtype, fresh)
        self.left_out = AllLeftOut(where_possible)
        self._prepared: dict[str, list[Measure]] = {}
        self._answers: dict[str, Answers] = {}
        self._said: dict[str, dict[int, Any]] = {}  # by the evaluator, per measure and length
        self._tokens: dict[str, str] = {}
        self._alone = True
        self._evaluator: Source | None = None

    def check(self, sources: Sequence[Source], evaluator: Source | None, windows: Windows) -> None:
        """Check everything that can be checked without weights.

        Raises:
            PoSEError: every option that cannot work, its value and the fix, one line each; two models of one name.
        """
        texts = next((measure.texts for measure in self.measures if measure.texts), [])
        self._alone, self._evaluator = len(sources) == 1, evaluator
        everyone = {id(source): source for source in [*sources, *filter(None, [evaluator])]}.values()
        names = [source.name for source in everyone]
        if len(set(names)) < len(names):
            # Tokenizers and answers are found by them.
            raise PoSEError(f"names={names}: two models have the same; give each a different name")
        complaints, device = Complaints(), place(self.device)
        kind_of(self.dtype)
        for source in everyone:
            with complaints:
                served = isinstance(source, ServedSource)
                possible = [measure for measure in self.measures if measure.on_a_server or not served]
                if not served and any(measure.reads_lengths for measure in possible):
                    # Before long prompts are made that no memory could read.
                    require_room(source.config, min(self.lengths), device)
                self._answers[source.name] = self.kept.answers(source)
                self._prepared[source.name] = [measure.model_copy() for measure in possible]
                for measure in self._prepared[source.name]:
                    measure.keep_in(self._answers[source.name])
                    with complaints:
                        self._prepare(measure, source, evaluator, windows)
                self._tokens[source.name] = digest(tokens_of(source.tokenizer, texts)) if texts else ""
        complaints.raise_all()
        if evaluator is not None:
            self._recall(evaluator)

    def _prepare(self, measure: Measure, source: Source, evaluator: Source | None, windows: Windows) -> None:
        if self.left_out.where_possible:
            left_out, why = prepare_where_possible(measure, source.tokenizer, self.lengths, windows)
            if left_out:
                listed = ", ".join(map(str, left_out))
                print(f"{source.name}: {measure.name} is not measured at {listed}: {why}", flush=True)
            self.left_out.found += [LeftOut(source.name, measure.name, n, why) for n in left_out]
        else:
            measure.prepare(source.tokenizer, self.lengths, windows)
        if measure.needs_evaluator and evaluator is not None:
            measure.evaluator = evaluator.name  # type: ignore[attr-defined]
            require_same_tokens(measure, evaluator.tokenizer, source.tokenizer, evaluator.name, source.name)

    def found(self, sources: Sequence[Source]) -> list[str]:
        """Return sentences on what the folder held before and is not used, or may be out of date."""
        sentences, versions = list[str](), ", ".join(self.kept.other_versions())
        if versions:
            where = self.kept.folder
            sentences.append(f"{where} also holds results of pose_plugin {versions}; they are kept there and not used")
        for source in sources:
            kept = len(self._answers[source.name].rows())
            if isinstance(source, ServedSource) and kept:
                sentences.append(
                    f"{source.name}: {counted(kept, 'answer')} of {source.model.server.address} kept from before, not "
                    "asked again; if its weights have changed since, use --fresh"
                )
            for measure in self._prepared[source.name]:
                if measure.unseen and any(self.kept.result(self._key(source, measure, n)) for n in measure.pieces()):
                    sentences.append(
                        f"{source.name}: results of {measure.name} kept from before, not measured again; if "
                        f"{measure.unseen} have changed since, use --fresh"
                    )
        return sentences

    def forecast(self, sources: Sequence[Source]) -> str:
        """Return how long everything that is missing will take, and how much memory; also of the evaluator."""
        parts = []
        for source in filter(None, [self._evaluator]):
            asked = [(m.name, work) for m in self._asking(source) for n in self._unsaid(m) for work in m.ask_work(n)]
            if asked:
                parts.append(f"{source.name}, as the evaluator\n{self._timed(self._open(source), asked, source)}")
        for source in sources:
            missing, text = self._missing(source), "  nothing is missing"
            if missing:
                text = self._forecast(self._open(source), missing, source)
            parts.append(f"{source.name}\n{text}")
        return "\n\n".join(parts)

    def share(self, sources: Sequence[Source]) -> None:
        """Measure this process's part of what is missing, wait for the other processes, and read what they found.

        Questions are divided. What asks none is measured by one process per length.
        """
        for turn, source in enumerate(sources, 1):
            print(f"[{turn}/{len(sources)}] {source.name}, shared by {self.ranks.world} processes", flush=True)
            missing = self._missing(source)
            works = [measure.work(n) for measure, n in missing]
            whole = [i for i, (measure, _) in enumerate(missing) if not isinstance(measure, Asking)]
            costs = [max(works[i].sequences, 1) * works[i].length for i in whole]
            owners = dict(zip(whole, self.ranks.owners(costs), strict=True))
            model = self._load(source)
            for i, (measure, n) in enumerate(missing):
                if model is None or self.left_out.has(source.name, measure.name, n):
                    continue
                if isinstance(measure, Asking):
                    self._attempt(model, source, measure, n, partial(self._answer_part, model, source, measure, n, i))
                elif owners[i] == self.ranks.rank:
                    self._measure(model, source, measure, n)
            del model
        self._join()

    def _answer_part(self, model: Any, source: Source, measure: Asking, n: int, number: int) -> None:
        parts = groups(unanswered(measure.questions(n), self._answers[source.name]))
        measure.answer(model, n, list(itertools.chain.from_iterable(self.ranks.mine(parts, number))))

    def _join(self) -> None:
        """Read what all processes found, and what they left out."""
        self.left_out.join(self.ranks.meet((self.left_out.found, self.left_out.failed)))
        self.kept.journal.read()
        # Nobody writes before all have read: they divide what is left in the same way.
        self.ranks.meet()

    def ask(self, evaluator: Source) -> None:
        """Let the evaluator answer what measures ask it about each length, unless it did before."""
        if self.ranks.world > 1:
            self._ask(evaluator, self.ranks)
            self._join()
            self._recall(evaluator)
        self._ask(evaluator)
        for measure in itertools.chain.from_iterable(self._prepared.values()):
            measure.answers = self._said.get(measure.name)

    def _recall(self, evaluator: Source) -> None:
        """Read what the evaluator answered before."""
        for measure in self._asking(evaluator):
            keys = {n: self.kept.key(evaluator, measure, n, "answer") for n in measure.pieces()}
            kept = {n: self.kept.journal.get(key) for n, key in keys.items()}
            self._said[measure.name] = {n: rows[-1]["result"] for n, rows in kept.items() if rows}

    def _unsaid(self, measure: Measure) -> list[int]:
        """Return the lengths about which the evaluator has not said anything yet."""
        return [n for n in measure.pieces() if n not in self._said[measure.name]]

    def _asking(self, evaluator: Source) -> list[Measure]:
        return [measure for measure in self._prepared[evaluator.name] if measure.needs_evaluator]

    def _ask(self, evaluator: Source, ranks: Ranks | None = None) -> None:
        model = None
        for measure in self._asking(evaluator):
            answers = self._said[measure.name]
            for number, n in enumerate(measure.pieces()):
                known = n in answers or self.left_out.has(None, measure.name, n)
                if known or (ranks and not ranks.mine([n], number)):
                    continue
                try:
                    if model is None:
                        print(f"{measure.name}: asking {evaluator.name}", flush=True)
                        model = self._open(evaluator)
                    answers[n] = measure.ask(model, n)
                except Exception as error:
                    reason = PoSEError(f"the evaluator {evaluator.name}: {_foreseen(error, evaluator, n)}")
                    # Longer ones need more.
                    self.left_out.add(None, measure.name, n, reason, isinstance(error, TooLittleMemory))
                    continue
                key = self.kept.key(evaluator, measure, n, "answer")
                self.kept.keep(key, evaluator, measure, n, answers[n])

    def results(self, source: Source) -> Iterator[ModelResult]:
        """Yield the model's results after each measure, more of them each time."""
        row = ModelResult(source.name, facts=source.facts, tokens=self._tokens[source.name])
        self._judge_answered(source)
        model = self._load(source)
        for measure in self._prepared[source.name]:
            parts = list(self._parts(model, source, measure))
            if parts:
                row.results[measure.name] = joined(parts)
            yield row
        del model
        torch.cuda.empty_cache()

    def _judge_answered(self, source: Source) -> None:
        """Judge lengths whose questions all have answers, as after other processes; this needs no model."""
        answers = self._answers[source.name]
        # Prompts of other lengths are not made here: one may be too long for the memory.
        asked = {(row.get("measure"), row.get("length")) for row in answers.rows()}
        for measure, n in self._missing(source):
            if not isinstance(measure, Asking) or (measure.name, n) not in asked:
                continue
            if not unanswered(measure.questions(n), answers):
                self._keep(source, measure, n, measure.run(None, n))

    def notes(self, source: Source) -> list[str]:
        """Return what was left out and what cannot be compared, for the report."""
        notes = source.notes_of(self._answers[source.name]) if isinstance(source, ServedSource) else []
        logits = [measure.name for measure in self.measures if not measure.on_a_server]
        if isinstance(source, ServedSource) and logits:
            notes.append(f"{', '.join(logits)} cannot be measured: servers do not return logits")
        notes += self.left_out.notes(source.name)
        first = next(iter(self._tokens))
        if self._tokens[source.name] != self._tokens[first]:
            notes.append(
                f"its tokenizer makes other tokens of the texts than that of {first}, so its losses per token cannot "
                "be compared and do not count for the best; give it its own --output to compare it with similar models"
            )
        return notes

    def _parts(self, model: Any, source: Source, measure: Measure) -> Iterator[Result]:
        for n in measure.pieces():
            found = self.kept.result(self._key(source, measure, n))
            if found is None and model is not None and not self.left_out.has(source.name, measure.name, n):
                found = self._measure(model, source, measure, n)
            if found is not None:
                yield found

    def _measure(self, model: Any, source: Source, measure: Measure, n: int) -> Result | None:
        """Measure one length and keep the result; None if it is left out."""
        part: Result | None = self._attempt(model, source, measure, n, partial(measure.run, model, n))
        if part is not None:
            self._keep(source, measure, n, part)
        return part

    def _attempt(self, model: Any, source: Source, measure: Measure, n: int, run: Callable[[], Any]) -> Any:
        """Return what `run` returns; None if it fails, which leaves this length out."""
        try:
            # Before long prompts are made that no memory could read.
            require_fits(model, measure.work(n).length)
            return run()
        except Exception as error:
            # Too little memory, data of lm-eval that is missing, positions that end before n, …: the rest goes on.
            # Longer ones need more memory, and a lost server answers nothing.
            longer = isinstance(error, TooLittleMemory | ServerGoneError)
            self.left_out.add(source.name, measure.name, n, _foreseen(error, source, n), longer)
            torch.cuda.empty_cache()
            if isinstance(error, ServerGoneError) and self._alone:
                raise
            return None

    def _load(self, source: Source) -> Any:
        """Return the model, or None if nothing is missing or it does not run."""
        missing = self._missing(source)
        if not missing:
            print("  nothing is missing", flush=True)
            return None
        try:
            model = self._open(source)
            print(self._forecast(model, missing, source), flush=True)
            return model
        except PoSEError as error:
            if self._alone:
                raise
            # The other models are worth their own results.
            self.left_out.add(source.name, ", ".join(dict.fromkeys(measure.name for measure, _ in missing)), 0, error)
            return None

    def _open(self, source: Source) -> Any:
        return source.model if isinstance(source, ServedSource) else load(source, self.dtype, self.device)

    def _missing(self, source: Source) -> list[tuple[Measure, int]]:
        return [
            (measure, n)
            for measure in self._prepared[source.name]
            for n in measure.pieces()
            if self.kept.result(self._key(source, measure, n)) is None
            and not self.left_out.has(source.name, measure.name, n)
        ]

    def _key(self, source: Source, measure: Measure, n: int) -> str:
        return self.kept.key(source, measure, n, "result", self._said.get(measure.name, {}).get(n))

    def _keep(self, source: Source, measure: Measure, n: int, result: Result) -> None:
        self.kept.keep(self._key(source, measure, n), source, measure, n, result.to_dict())

    def _forecast(self, model: Any, missing: Sequence[tuple[Measure, int]], source: Source) -> str:
        if isinstance(model, ServedModel):
            return cost(model, missing, self._answers[source.name])
        return self._timed(model, [(measure.name, measure.work(n)) for measure, n in missing], source)

    def _timed(self, model: Any, works: Sequence[tuple[str, Work]], source: Source) -> str:
        try:
            return forecast(model, works, self.measures[0].batch_size)
        except PoSEError:
            raise
        except Exception as error:
            raise PoSEError(
                f"{source.path} was loaded, but cannot run on {device_of(model)}: {first_line(error)}. Use another "
                "--device or --dtype"
            ) from error


def _foreseen(error: Exception, source: Source, n: int) -> PoSEError:
    """Return the error, or for what a model's own code raised a sentence; its traceback goes to the log."""
    if isinstance(error, PoSEError):
        return error
    log.warning("%s failed at %d tokens", source.name, n, exc_info=error)
    beyond = source.maximum is not None and n > source.maximum
    hint = f"; its positions may end at max_position_embeddings={source.maximum}" if beyond else ""
    return PoSEError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{hint}")
