"""Quotes must be in the text, except for changes that a faithful copy may have."""

from __future__ import annotations

import pytest

from pose_plugin.synthesize.quotes import Finder, Span

TEXT = "The whale came up\nat dawn. " + "Nothing happened for days and days. " * 100 + "At dusk “the ship’s bell” rang."


@pytest.mark.parametrize(
    ("quotes", "found", "apart"),
    [
        (["the WHALE came  up at dawn", "The ship's bell"], 2, True),
        (["the whale came up", "came up at dawn."], 2, False),
        (["at dawn the whale", "the ship's bell"], 1, False),
        (["whale"], 0, False),
        # A name, though it has 9 characters.
        (["The Whale", "Nothing happened"], 0, False),
        # The same place twice.
        (["the whale came up", "THE whale – came up!"], 1, False),
        ([], 0, False),
    ],
)
def test_quotes_are_looked_up(quotes, found, apart):
    finder = Finder([TEXT])
    spans = finder.any(quotes)
    assert len(spans) == found
    assert finder.apart(quotes) == (spans if apart else [])


SOURCE = (
    "In 1871,[3] Ada **Thornbury** — then 29 — carried the lamp\nup 3.5 m of stairs; it’s the one "
    "[she had\u00a0built](http://x.org/a). The light\u00adhouse-\nkeeper’s cafe\u0301 paid £1,000 to the eﬃcient men."
)
HONEST = {
    "Ada Thornbury - then 29 - carried the lamp up": "Ada **Thornbury** — then 29 — carried the lamp\nup",
    "in 1871, ada thornbury": "In 1871,[3] Ada **Thornbury",
    "*Ada* `Thornbury`, then 29...": "Ada **Thornbury** — then 29",
    "«It's the one she had built.»": "it’s the one [she had\u00a0built",
    "the lighthouse keeper's café paid": "The light\u00adhouse-\nkeeper’s cafe\u0301 paid",
    "paid 1,000 to the eｆficient men": "paid £1,000 to the eﬃcient men",
    "“up 3.5\u202fm of stairs”": "up 3.5 m of stairs",
}
UNTRUE = [
    "up 35 m of stairs",
    "up 3,5 m of stairs",
    "paid 1000 to the",
    "in 1872, Ada Thornbury",
    "Ada Thornbury carried the lamp",
    "Ada Thornbury then carried",
    "the lighthouse keepers cafe paid nothing",
    "… — “ ”",
]


@pytest.mark.parametrize("quote", HONEST)
def test_faithful_copies(quote):
    (span,) = Finder([SOURCE]).any([quote])
    assert SOURCE[span.start : span.end] == HONEST[quote]


@pytest.mark.parametrize("quote", UNTRUE)
def test_wrong_quotes(quote):
    assert Finder([SOURCE]).any([quote]) == []


@pytest.mark.parametrize(
    ("text", "quote"),
    [
        ("They were unable to go home.", "able to go home"),
        ("They were able to go homeward.", "able to go home"),
        ("It is 15 miles from home.", "5 miles from home"),
        ("It is 1,005 miles from home.", "005 miles from home"),
        ("All of it costs 3.5 pounds.", "all of it costs 3"),
        ("All of it costs 30 pounds.", "all of it costs 3"),
        ("He went to the cafe\u0301 again.", "he went to the cafe"),
        ("Then a[12] = 3 is set.", "then a[10] = 3 is set"),
    ],
)
def test_a_quote_has_whole_words_and_numbers(text, quote):
    assert Finder([text]).any([quote]) == []
    # A correct occurrence later in the text is found.
    true = f"{text} In truth: {quote}."
    assert [true[span.start : span.end] for span in Finder([true]).any([quote])] == [quote]


@pytest.mark.parametrize(
    "quote", ["the first,[1] and the last", "the first, and the last", "the first and the last.[2]"]
)
def test_footnotes_may_be_left_out(quote):
    (span,) = Finder(["It was the first,[1] and the last.[2]"]).any([quote])
    assert (span.start, span.end) == (7, 33)


@pytest.mark.parametrize(
    ("quote", "parts"),
    [
        ("In 1871 … carried the lamp up", ["In 1871", "carried the lamp\nup"]),
        ("ADA ... carried the lamp [...] of stairs", ["Ada", "carried the lamp", "of stairs"]),
        ("... carried the lamp up. . .", ["carried the lamp\nup"]),
        # In another order, with an invented part, and names only.
        ("carried the lamp up ... in 1871", []),
        ("carried the lamp up ... and fell asleep", []),
        ("Ada ... lamp ... stairs", []),
    ],
)
def test_dots_for_words(quote, parts):
    assert [SOURCE[span.start : span.end] for span in Finder([SOURCE]).any([quote])] == parts


def test_parts_of_a_quote_must_be_close():
    text = "It began when the whale came up. " + "Nothing happened. " * 100 + "It ended when the ship went down."
    assert Finder([text]).any(["the whale came up ... the ship went down"]) == []
    assert (
        len(Finder([text.replace("Nothing happened. " * 70, "")]).any(["the whale came up ... the ship went down"]))
        == 2
    )


def test_dots_in_the_text_itself():
    assert Finder(["He paused ... and then he went on."]).any(["paused... and then he went"]) == [Span(0, 3, 30)]


def test_places_of_a_piece_are_those_in_its_document():
    text = "Before it. The whale came up at dawn."
    (span,) = Finder([text[11:]], [11]).any(["the whale came up"])
    assert text[span.start : span.end] == "The whale came up"


@pytest.mark.parametrize(
    "quote",
    [
        "鯨は夜明けに浮かび上がった",
        "طلع الحوت عند الفجر",
    ],
)
def test_quotes_in_scripts_without_capitals(quote):
    assert len(Finder([f"{quote}。"]).any([quote])) == 1
    assert not Finder([f"{quote}。"]).any([quote[:7]])
    # These scripts break lines anywhere.
    assert len(Finder([f"{quote[:5]}\n{quote[5:]}。"]).any([quote])) == 1


def test_marks_that_are_vowels_must_match():
    assert (
        Finder(["\u0915\u0941\u0924\u094d\u0924\u093e \u0918\u0930 \u092e\u0947\u0902 \u0939\u0948"]).any(
            ["\u0915\u0924\u094d\u0924\u093e \u0918\u0930 \u092e\u0947\u0902 \u0939\u0948"]
        )
        == []
    )


def test_quotes_from_several_texts():
    finder = Finder(["The first text tells of whales.", "The second one tells of ships."])
    assert finder.several(["tells of whales", "tells of ships"]) == [Span(0, 15, 30), Span(1, 15, 29)]
    assert finder.several(["tells of whales", "The first text"]) == []
