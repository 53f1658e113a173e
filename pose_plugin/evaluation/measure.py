"""What a measure is: one class in one file of `measures/`, and one row of `measures.MEASURES`.

    class Length(Measure):
        name, title, label = "length", "Tokens of an answer", "tokens"

        most: PositiveInt = Field(100, description="tokens of the longest answer")

        def run(self, model, length):
            return Result(self.name, "Tokens of the answer.", (Row(length, count(model, length, self.most)),))

Fields with a description are options: `--most` of the command and `most` of the `evaluate:` block. The command, the
block, the callback, tables, CSV files, pictures and the cache of results read the declarations, so nothing else has to
name the measure.

Nothing here or at the top of a measure's file imports torch: the command's help reads the declarations only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from pose_plugin.config import PositiveInt
from pose_plugin.evaluation.prompts import ids_of_each, leading_ids, plain_tokenizer
from pose_plugin.evaluation.results import Result, Row, Work, joined
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.lengths import lengths_of


@dataclass(frozen=True)
class Windows:
    """Context windows in tokens, for defaults that follow from the models; None if unknown.

    Attributes:
        base: L_0, the window that the base model was made with.
        trained: L_c, the window that is or was trained.
    """

    base: int | None = None
    trained: int | None = None


class Measure(BaseModel):
    """One way to judge a model. The fields are the settings, `prepare` checks them, and `run` measures one length.

    Attributes:
        name: in `--tasks`, `evaluate.tasks`, logs and files.
        title: of the table; `{kind}` and `{length}` are filled in.
        label: of the vertical axis of the picture.
        x_label: of the horizontal axis.
        depth_label: of the vertical axis of a heat map.
        higher_is_better: whether more is better. Such scores are shares of 1, the others losses or perplexities.
        log_scale: whether the picture's vertical axis is logarithmic.
        by_default: whether it is measured if the user names no measures.
        needs_texts: whether it measures on texts of the user.
        reads_lengths: whether it reads texts of the lengths asked for, and not shorter ones.
        needs_evaluator: whether another model has to say first what is measured; see `ask`.
        on_a_server: whether a served model can be measured; see `asking.Asking`. Servers give no logits.
        while_training: whether it can be part of the `evaluate:` block.
        chosen_by: the option that selects it in the command; "" if that is `--tasks`.
        unseen: what a kept result depends on too, and nothing can notice a change of; "" for nothing.
        costly: whether it takes so much longer than the others that `all` leaves it out.
        ranked: whether it takes part in the choice of the best model.
        ranked_kinds: the kinds that take part; () for all.
        comparison: titles of two more columns that compare a model with the first one; see `compare`.
        texts: what is measured on: texts, or their token ids without special tokens.
        progress: whether to show a progress bar.
        answers: what the evaluator said, by length; None before it has been asked.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    name: ClassVar[str]
    title: ClassVar[str]
    label: ClassVar[str]
    x_label: ClassVar[str] = "window size (tokens)"
    depth_label: ClassVar[str] = "depth"
    higher_is_better: ClassVar[bool] = False
    log_scale: ClassVar[bool] = False
    by_default: ClassVar[bool] = False
    needs_texts: ClassVar[bool] = False
    reads_lengths: ClassVar[bool] = True
    needs_evaluator: ClassVar[bool] = False
    on_a_server: ClassVar[bool] = False
    while_training: ClassVar[bool] = True
    chosen_by: ClassVar[str] = ""
    unseen: ClassVar[str] = ""
    costly: ClassVar[bool] = False
    ranked: ClassVar[bool] = True
    ranked_kinds: ClassVar[tuple[str, ...]] = ()
    comparison: ClassVar[tuple[str, str] | None] = None

    texts: list[Any] = []
    progress: bool = True
    answers: dict[int, Any] | None = None
    batch_size: PositiveInt | None = Field(None, description="sequences in one forward; default: about 16k tokens")

    _kept: Any = None
    _tokenizer: Any = None
    _lengths: list[int] = []

    def prepare(self, tokenizer: Any, lengths: Sequence[int], windows: Windows | None = None) -> None:
        """Check everything that can be checked without a model, and keep what `run` needs.

        Args:
            lengths: in tokens; all that will be measured.
            windows: for defaults that follow from the models.

        Raises:
            PoSEError: a setting that cannot work, e.g. a length that a prompt does not fit in.
        """
        if not lengths or min(lengths) < 1:
            raise PoSEError(f"lengths={list(lengths)}: give numbers of tokens of at least 1, e.g. lengths=[2048, 4096]")
        self._tokenizer, self._lengths = plain_tokenizer(tokenizer), sorted(set(lengths))

    def keep_in(self, answers: Any) -> None:
        """Use the `asking.Answers` of a model that there are already, and keep new ones there."""
        self._kept = answers

    def pieces(self) -> list[int]:
        """Return the lengths that are measured one by one, each kept on the disk when it is done."""
        return self._lengths

    def work(self, length: int) -> Work:
        """Return what `run` takes at a length, for the forecast. No sequences: it cannot be estimated."""
        return Work(length, 0)

    def run(self, model: Any, length: int) -> Result:
        """Measure a model at one length, positions plain; its mode and random state are restored afterwards."""
        raise NotImplementedError

    def ask(self, evaluator: Any, length: int) -> Any:
        """Return what the evaluator model says about a length, as JSON; `run` finds it in `answers[length]`."""
        raise NotImplementedError

    def ask_work(self, length: int) -> list[Work]:
        """Return what `ask` takes of the evaluator at a length, for the forecast."""
        return []

    def depends(self) -> dict[str, Any]:
        """Return what a result depends on, besides the model and the length; the key of what is kept on the disk."""
        return self.model_dump(exclude={"batch_size", "progress", "answers"})

    def measure(self, model: Any, tokenizer: Any, lengths: Sequence[int | str]) -> Result:
        """Measure a model at all lengths.

        Args:
            lengths: in tokens; "32k" stands for 32,768.

        Raises:
            PoSEError: what `prepare` raises; a length that does not fit in memory.
        """
        from pose_plugin.evaluation.memory import require_fits

        self.prepare(tokenizer, lengths_of(lengths))
        for length in self.pieces():
            # Before anything runs: a later length must not end what was started.
            require_fits(model, self.work(length).length)
        return joined([self.run(model, length) for length in self.pieces()])

    @classmethod
    def show(cls, row: Row) -> str:
        """Return the text of a table's cell."""
        return f"{row.score:.3f}"

    @classmethod
    def place(cls, row: Row) -> tuple[str, str]:
        """Return the title of the table and of the column that show a row."""
        return cls.title.format(kind=row.kind, length=row.length), str(row.length)

    @classmethod
    def summary(cls, result: Result) -> dict[str, int]:
        """Return figures over all lengths by name: more columns of the table, and logged while training."""
        return {}

    @classmethod
    def compare(cls, row: Row, first: Row) -> tuple[str, str]:
        """Return the cells of `comparison` for a model's row and that of the first model."""
        raise NotImplementedError


def default_lengths(target: int) -> list[int]:
    """Return an eighth of the target, doubled up to twice the target: models fail beyond the edge first."""
    return sorted({max(1, target * 2**k // 8) for k in range(5)})


def prepare_where_possible(
    measure: Measure, tokenizer: Any, lengths: Sequence[int], windows: Windows | None = None
) -> tuple[list[int], str]:
    """Prepare a measure for as many of some lengths as it can be measured at.

    Returns:
        the lengths that are left out, and why.

    Raises:
        PoSEError: it can be measured at none of them.
    """
    ranges = [lengths[a:b] for a, b in itertools.combinations(range(len(lengths) + 1), 2)]
    reason: PoSEError | None = None
    for some in sorted(ranges, key=len, reverse=True):
        try:
            measure.prepare(tokenizer, some, windows)
        except PoSEError as error:
            reason = error
            continue
        return [n for n in lengths if n not in some], str(reason)
    raise reason or PoSEError("lengths is empty")


def require_same_tokens(measure: Measure, evaluator: Any, tokenizer: Any, name: str, other: str) -> None:
    """Raise PoSEError if two tokenizers make different tokens of the texts; e.g. another pad token does not matter.

    Args:
        evaluator: the evaluator's tokenizer, `name` its model.
        tokenizer: that of `other`, the model to be measured.
    """
    if tokens_of(evaluator, measure.texts) != tokens_of(tokenizer, measure.texts):
        raise PoSEError(
            f"{measure.name}: {other} and the evaluator {name} have different tokenizers, so their tokens cannot be "
            f"compared; give an evaluator with the same tokenizer, or leave {measure.name} out"
        )


def tokens_of(tokenizer: Any, texts: Sequence[Any]) -> list[Any]:
    """Return the ids that a tokenizer puts before every text, and those of each text."""
    tokenizer = plain_tokenizer(tokenizer)
    return [leading_ids(tokenizer), *ids_of_each(tokenizer, texts)]
