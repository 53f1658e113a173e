"""Which model is best, by figures made by hand."""

from __future__ import annotations

import math

import pytest

from pose_plugin.evaluation import report as report_of
from pose_plugin.evaluation.best import Best, best_by_measure, best_sentence, overall
from pose_plugin.evaluation.results import ModelResult, Report, Result, Row


def result(measure, *rows):
    return Result(measure, "", rows)


def keys(share: dict[int, int]) -> Result:
    """Of ten keys at each length, so many are found."""
    return result("passkey", *(Row(n, float(i < right)) for n, right in share.items() for i in range(10)))


def gap(loss: float) -> Result:
    return result("gap", Row(640, 3.0), Row(2048, loss))


def model(name, *results, tokens=""):
    return ModelResult(name, {result.measure: result for result in results}, tokens=tokens)


def sentence(report):
    return best_sentence(best_by_measure(report))


def test_the_best_by_measure_and_over_all():
    report = Report(
        [
            model("base", keys({128: 10, 256: 0}), gap(6.0)),
            model("step 100", keys({128: 8, 256: 9}), gap(3.5)),
            model("step 1000", keys({128: 9, 256: 9}), gap(3.9)),
        ],
        train_length=128,
    )
    passkey, probe = best_by_measure(report)
    # At the trained window itself the base is best; only what is beyond counts.
    assert passkey.measure == "passkey, mean beyond 128" and passkey.names == ["step 100", "step 1000"]
    assert [passkey.rank(m.name) for m in report.models] == [3, 1.5, 1.5]
    assert probe.measure == "gap at 2048" and probe.names == ["step 100"]
    assert overall([passkey, probe]) == [("step 100", 1.25), ("step 1000", 1.75), ("base", 3.0)]
    assert sentence(report).startswith(
        "Best over all measures: step 100 (mean rank: step 100 1.25, step 1000 1.75, base 3.00"
    )
    assert all(part in report_of.markdown(report) for part in ("Best by measure", sentence(report)))


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
    models = [model(n, keys({256: right})) for n, right in (("late", 8), ("early", 9), ("base", 0))]
    report = Report(models)
    (title,) = (title for title in report_of.tables(report) if title.startswith("Best"))
    assert report_of.tables(report)[title][1] == [["passkey, mean over lengths", "early ≈ late", "0.8", "0.9", "0"]]
    assert sentence(report) in report_of.markdown(report)
    assert sentence(report) == (
        "Best over all measures: early (mean rank: early 1.00, late 2.00, base 3.00; 1 is best in every measure). "
        "Differences between early and late are within noise in every measure; use more trials or longer texts."
    )
    # Another measure that does.
    losses = {"late": 3.0, "early": 2.0, "base": 2.5}
    for m in models:
        pieces = tuple(losses[m.name] + 0.1 * i for i in range(5))
        m.results["gap"] = result("gap", Row(640, losses[m.name], samples=pieces))
    assert report_of.tables(report)[title][1][1][1] == "early" and "within noise in every" not in sentence(report)


def test_only_lengths_that_all_have_count_beyond_the_window_where_there_are_such():
    models = [model("a", keys({128: 9, 256: 5, 512: 1})), model("b", keys({128: 8, 256: 7, 1024: 9}))]
    for window, values, count in ((128, {"a": 0.5, "b": 0.7}, 10), (256, {"a": 0.7, "b": 0.75}, 20)):
        (found,) = best_by_measure(Report(models, train_length=window))
        assert found.values == pytest.approx(values) and {len(s) for s in found.samples.values()} == {count}


def test_losses_of_other_tokens_are_not_compared():
    models = [
        model("a", keys({256: 1}), gap(4.0), tokens="x"),
        model("b", keys({256: 9}), gap(1.0), tokens="y"),
        model("c", keys({256: 2}), gap(3.0), tokens="x"),
    ]
    passkey, probe = best_by_measure(Report(models))
    assert passkey.names == ["b"] and probe.names == ["c"] and set(probe.values) == {"a", "c"}
    assert [one.measure for one in best_by_measure(Report(models[:2]))] == ["passkey, mean over lengths"]


def losses(name, loss, spread=0.0):
    """A model with every measure of loss: `spread` apart from window to window."""
    each = tuple(loss + spread * i for i in (-2, -1, 0, 1, 2))
    row = Row(256, math.exp(loss) if math.isfinite(loss) else loss, 9, samples=each)
    probe = result("gap", Row(256, loss, 9, samples=each))
    return model(name, result("perplexity", Row(128, 8000.0), row), result("longppl", row), probe)


def test_every_loss_at_the_longest_length_window_by_window():
    found = best_by_measure(Report([losses("a", 2.0, 0.5), losses("b", 1.5), losses("c", 1.9)]))
    assert [one.measure for one in found] == ["perplexity at 256", "longppl at 256", "gap at 256"]
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


def test_kinds_count_one_by_one():
    def needles(name, single, kv):
        return model(
            name, result("needle", *(Row(256, v, kind=k) for k, v in (("single", single), ("kv", kv)) for _ in "12345"))
        )

    single, kv = best_by_measure(Report([needles("a", 1.0, 0.0), needles("b", 0.5, 0.5)]))
    assert (single.measure, kv.measure) == ("needle single, mean over lengths", "needle kv, mean over lengths")
    assert (single.values, kv.values) == ({"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 0.5})
    assert (single.samples["a"], kv.samples["a"]) == ((1.0,) * 5, (0.0,) * 5)


def test_prompts_within_the_trained_window_do_not_count_where_others_reach_beyond():
    def facts(near, far):
        rows = {"1024": (1024, near), "8192": (8192, far)}
        return result("haystack", *(Row(n, share, 5, kind=kind) for kind, (n, share) in rows.items()))

    models = [model("base", facts(1.0, 0.0)), model("trained", facts(0.9, 0.5))]
    (best,) = best_by_measure(Report(models, train_length=2048))
    assert best.measure == "haystack 8192, mean beyond 2048" and best.names == ["trained"]
    assert len(best_by_measure(Report(models, train_length=8192))) == 2


def test_a_model_without_one_of_the_measures_has_no_place_over_all():
    only_keys = model("c", keys({256: 10}))
    report = Report([model("a", keys({256: 5}), gap(3.0)), model("b", keys({256: 4}), gap(4.0)), only_keys])
    assert [name for name, _ in overall(best_by_measure(report))] == ["a", "b"]
    assert [name for name, _ in overall(best_by_measure(Report([only_keys, *report.models[:2]])))] == ["a", "b"]


def test_ties_and_models_alone():
    assert Best("x", {"a": 1.0, "b": 1.0}, True).names == ["a", "b"]
    assert sentence(Report([model("a", keys({128: 5}))])) is None
    assert sentence(Report([model("a", keys({128: 5})), model("b", keys({256: 5}))])) is None
    assert "a = b" in sentence(Report([model("a", keys({128: 5})), model("b", keys({128: 5}))]))
    broken = Report([model(n, gap(v)) for n, v in (("a", 4.0), ("b", 3.0), ("c", math.nan))])
    assert best_by_measure(broken)[0].names == ["b"]
