import math

import pytest

from pose_plugin.evaluation import report as report_of
from pose_plugin.evaluation.best import Best, best_by_measure, overall
from pose_plugin.evaluation.cost import Work, duration, estimates, operations
from pose_plugin.evaluation.measures.gap import Gap, GapResult
from pose_plugin.evaluation.measures.longppl import LongPPL, LongPPLResult
from pose_plugin.evaluation.measures.passkey import PasskeyResult, PasskeyTrial
from pose_plugin.evaluation.measures.perplexity import PerplexityResult, WindowPerplexity
from pose_plugin.evaluation.results import ModelResult, Report
from pose_plugin.evaluation.retrieval import RetrievalResult, RetrievalTrial


def test_operations_by_hand(make_llama):
    model = make_llama()
    weights = sum(p.numel() for p in model.parameters()) - 400 * 32
    assert operations(model, 10) == 2 * weights * 10 + 2 * 2 * 32 * 100


def test_an_estimate_goes_by_operations(make_llama):
    model, ticks = make_llama(max_position_embeddings=4096), iter([10.0, 13.0])
    works = [Work("passkey", 512, 4), Work("needle", 2048, 2, steps=3)]
    short, long = estimates(model, works, clock=lambda: next(ticks))
    assert short.seconds == pytest.approx(4 * 3.0)
    once = operations(model, 2048) + 3 * operations(model, 1)
    assert long.seconds == pytest.approx(2 * 3.0 * once / operations(model, 512))
    assert "needle          2048 tokens ×     2  about" in long.line() and "GiB" in long.line()
    assert estimates(model, []) == []


def test_the_timed_forward_stays_within_the_model_s_positions(make_llama):
    """A table of positions may end there."""
    model, ticks = make_llama(max_position_embeddings=64), iter([10.0, 13.0])
    (found,) = estimates(model, [Work("passkey", 512, 1)], clock=lambda: next(ticks))
    assert found.seconds == pytest.approx(3.0 * operations(model, 512) / operations(model, 64))


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "?"), (0.2, "a second"), (42, "42 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def keys(share: dict[int, int]) -> PasskeyResult:
    trials = [PasskeyTrial(n, 0.5, "1", "", i < right) for n, right in share.items() for i in range(10)]
    return PasskeyResult(tuple(trials), None, 0, "")


def gap(loss: float) -> GapResult:
    return GapResult({640: Gap(640, 0, 3.0, 1), 2048: Gap(2048, 1408, loss, 1)}, 640, 256, 1)


def test_the_best_by_measure_and_over_all():
    report = Report(
        [
            ModelResult("base", keys({128: 10, 256: 0}), gap=gap(6.0)),
            ModelResult("step 100", keys({128: 8, 256: 9}), gap=gap(3.5)),
            ModelResult("step 1000", keys({128: 9, 256: 9}), gap=gap(3.9)),
        ],
        train_length=128,
    )
    passkey, probe = best_by_measure(report)
    # At the trained window itself the base is best; only what is beyond counts.
    assert passkey.measure == "passkey, mean beyond 128" and passkey.names == ["step 100", "step 1000"]
    assert [passkey.rank(m.name) for m in report.models] == [3, 1.5, 1.5]
    assert probe.measure == "gap loss at 2048" and probe.names == ["step 100"]
    assert overall([passkey, probe]) == [("step 100", 1.25), ("step 1000", 1.75), ("base", 3.0)]
    assert report_of.best(report).startswith(
        "Best over all measures: step 100 (mean rank: step 100 1.25, step 1000 1.75, base 3.00"
    )
    assert "Best by measure" in report_of.text(report) and report_of.best(report) in report_of.markdown(report)


@pytest.mark.parametrize(
    ("differences", "apart"),
    [
        ([1, 1, 0, 0, 0], False),  # mean 0.4, standard error 0.245
        ([1, 1, 1, 0, -0.3], False),  # mean 0.54, standard error 0.286; 0.256 without Bessel's correction
        ([1, 1, 1, 0, 0], True),  # mean 0.6, standard error 0.245
        ([-1, -1, -1, 0, 0], True),
        ([1, 1, 1, 1], False),  # too few
        ([1, 1, 1, 1, 1], True),
        ([1, -1, 1, -1, 0], False),
        ([], False),
    ],
)
def test_two_models_are_told_apart_prompt_by_prompt(differences, apart):
    """Whatever else a prompt is worth takes no part."""
    base = [3.0, -2.0, 0.5, 9.0, 1.0][: len(differences)]
    samples = {"a": tuple(b + d for b, d in zip(base, differences, strict=True)), "b": tuple(base)}
    best = Best("x", {"a": 2.0, "b": 1.0}, True, samples)
    assert (best.apart("a", "b"), best.apart("b", "a")) == (apart, apart)
    assert (best.names, best.close) == (["a"], [] if apart else ["b"])


def test_one_of_two_leaders_is_enough_to_be_close_to():
    samples = {"a": (1.0,) * 5, "b": (2.0, 2.0, 1.0, 0.0, 0.0), "c": (0.6,) * 5, "d": (-9.0,) * 5}
    best = Best("x", {"a": 1.0, "b": 1.0, "c": 0.6, "d": -9.0}, True, samples)
    assert (best.apart("c", "a"), best.apart("c", "b")) == (True, False)
    assert (best.names, best.close) == (["a", "b"], ["c"])


def test_unequal_samples_tell_nothing():
    assert not Best("x", {"a": 2.0, "b": 1.0}, True, {"a": (1.0,) * 9, "b": (0.0,) * 8}).apart("a", "b")
    assert Best("x", {"a": 2.0, "b": 1.0}, False).close == ["a"]


def test_the_report_says_what_is_not_told_apart():
    """9 and 8 of ten keys are no difference, 9 and none are one."""
    models = [ModelResult(n, keys({256: right})) for n, right in (("late", 8), ("early", 9), ("base", 0))]
    report = Report(models)
    (title,) = (title for title in report_of.tables(report) if title.startswith("Best"))
    assert report_of.tables(report)[title][1] == [["passkey, mean over lengths", "early ≈ late", "0.8", "0.9", "0"]]
    assert "≈ not told apart from the best (on the same prompts" in report_of.text(report) and report_of.best(
        report
    ) in report_of.text(report)
    assert report_of.best(report) == (
        "Best over all measures: early (mean rank: early 1.00, late 2.00, base 3.00; 1 is best in every measure). "
        "No measure tells late apart from early: more trials or longer texts would."
    )
    # Another measure that does.
    losses = {"late": 3.0, "early": 2.0, "base": 2.5}
    for m in models:
        pieces = tuple(losses[m.name] + 0.1 * i for i in range(5))
        m.gap = GapResult({640: Gap(640, 0, losses[m.name], 1, pieces)}, 640, 256, 5)
    assert report_of.tables(report)[title][1][1][1] == "early" and "No measure" not in report_of.best(report)


def test_only_lengths_that_all_have_count_beyond_the_window_where_there_are_such():
    models = [ModelResult("a", keys({128: 9, 256: 5, 512: 1})), ModelResult("b", keys({128: 8, 256: 7, 1024: 9}))]
    for window, values, count in ((128, {"a": 0.5, "b": 0.7}, 10), (256, {"a": 0.7, "b": 0.75}, 20)):
        (found,) = best_by_measure(Report(models, train_length=window))
        assert found.values == pytest.approx(values) and {len(s) for s in found.samples.values()} == {count}


def test_losses_of_other_tokens_are_not_compared():
    models = [
        ModelResult("a", keys({256: 1}), gap=gap(4.0), tokens="x"),
        ModelResult("b", keys({256: 9}), gap=gap(1.0), tokens="y"),
        ModelResult("c", keys({256: 2}), gap=gap(3.0), tokens="x"),
    ]
    passkey, probe = best_by_measure(Report(models))
    assert passkey.names == ["b"] and probe.names == ["c"] and set(probe.values) == {"a", "c"}
    assert [one.measure for one in best_by_measure(Report(models[:2]))] == ["passkey, mean over lengths"]


def losses(name, loss, spread=0.0):
    """A model with every measure of loss: `spread` apart from window to window."""
    each = tuple(loss + spread * i for i in (-2, -1, 0, 1, 2))
    window = WindowPerplexity(256, 128, 5, 9, loss, (), each)
    result = PerplexityResult({128: WindowPerplexity(128, 64, 5, 9, 9.0, ()), 256: window}, False, 1, 0)
    far = LongPPLResult({256: LongPPL(256, loss, 9, 1.0, 9, each)}, "e", 64, 2.0, -2.0, 5)
    return ModelResult(
        name, perplexity=result, longppl=far, gap=GapResult({256: Gap(256, 0, loss, 9, each)}, 128, 51, 5)
    )


def test_every_loss_at_the_longest_length_window_by_window():
    found = best_by_measure(Report([losses("a", 2.0, 0.5), losses("b", 1.5), losses("c", 1.9)]))
    assert [one.measure for one in found] == ["perplexity at 256", "LongPPL at 256", "gap loss at 256"]
    for one in found[:2]:
        assert one.values == pytest.approx({"a": math.exp(2.0), "b": math.exp(1.5), "c": math.exp(1.9)})
    # Two nats from window to window hide half a nat between models; 0.4 without any are told apart.
    assert [(one.names, one.close) for one in found] == [(["b"], ["a"])] * 3


def test_what_is_no_number_is_the_worst_and_told_apart():
    for nothing in (math.nan, math.inf):
        found = best_by_measure(Report([losses("a", nothing), losses("b", 1.5), losses("c", 1.6, nothing)]))
        gap = found[-1]
        assert gap.names == ["b"] and gap.close == ["c"]  # c's windows say nothing
        assert gap.apart("a", "b") and gap.rank("a") == 3.0
    assert best_by_measure(Report([losses("a", math.nan), losses("b", math.nan)])) == []


def test_kinds_of_needles_are_measures_of_their_own():
    def model(name, single, kv):
        trials = [
            RetrievalTrial(k, 256, 0.0, ("1",), "", v) for k, v in (("single", single), ("kv", kv)) for _ in "12345"
        ]
        return ModelResult(name, needle=RetrievalResult("needle", tuple(trials), {}, {}, {}, ""))

    single, kv = best_by_measure(Report([model("a", 1.0, 0.0), model("b", 0.5, 0.5)]))
    assert (single.values, kv.values) == ({"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 0.5})
    assert (single.samples["a"], kv.samples["a"]) == ((1.0,) * 5, (0.0,) * 5)


def test_topics_count():
    def model(name, score):
        trials = tuple(RetrievalTrial("first", 256, 0.0, ("x",), "", score) for _ in "12345")
        return ModelResult(name, topics=RetrievalResult("topics", trials, {}, {}, {}, ""))

    (found,) = best_by_measure(Report([model("a", 0.25), model("b", 0.75)]))
    assert (found.measure, found.names) == ("topics first, mean over lengths", ["b"])


def test_a_model_without_one_of_the_measures_has_no_place_over_all():
    only_keys = ModelResult("c", keys({256: 10}))
    report = Report(
        [ModelResult("a", keys({256: 5}), gap=gap(3.0)), ModelResult("b", keys({256: 4}), gap=gap(4.0)), only_keys]
    )
    assert [name for name, _ in overall(best_by_measure(report))] == ["a", "b"]
    assert [name for name, _ in overall(best_by_measure(Report([only_keys, *report.models[:2]])))] == ["a", "b"]


def test_ties_and_models_alone():
    assert Best("x", {"a": 1.0, "b": 1.0}, True).names == ["a", "b"]
    assert report_of.best(Report([ModelResult("a", keys({128: 5}))])) is None
    assert report_of.best(Report([ModelResult("a", keys({128: 5})), ModelResult("b", keys({256: 5}))])) is None
    tied = Report([ModelResult("a", keys({128: 5})), ModelResult("b", keys({128: 5}))])
    assert "a = b" in report_of.best(tied)
    broken = Report([ModelResult(n, gap=gap(v)) for n, v in (("a", 4.0), ("b", 3.0), ("c", math.nan))])
    assert best_by_measure(broken)[0].names == ["b"]
