"""The words of the training rows. None of them is a wording, a name or a text of the judged haystacks."""

from __future__ import annotations

_NAMES = (
    "Alice Benjamin Clara Dmitri Elena Felix Greta Hassan Ingrid Jonas Keiko Leon Maria Nikhil Olga Pedro Quentin Rosa "
    "Samuel Tara Ulrich Vera Wesley Ximena Yusuf Zelda Agnes Bruno Celia Derek Esther Fabian Gloria Hugo Irene Jasper "
    "Kirsten Lorenzo Mabel Norman Octavia Philip Rachel Stefan Thelma Ursula Victor Wanda"
)
NAMES = tuple(_NAMES.split())
INTROS = (
    "Read the text and keep every number in mind.",
    "Below is a text. Some lines in it hold numbers that you will need.",
    "Here is a part of a play. Remember the numbers that do not belong to it.",
    "There are a few notes between the lines of this text. Learn them by heart.",
    "Please read this carefully. One question follows at the end.",
    "Text:",
    "",
)
TEMPLATES = (
    ("{name}'s number is {key}.", "What is {name}'s number? {name}'s number is"),
    ("The secret of {name} is {key}.", "The secret of {name} is"),
    ("{name} has the code {key}.", "Which code does {name} have? {name} has the code"),
    ("Code for {name}: {key}", "Code for {name}:"),
    ("{name} = {key}", "{name} ="),
    ("The ticket of {name} has the number {key}.", "Question: which number has the ticket of {name}? Answer:"),
    ("{name} lives in house {key}.", "In which house does {name} live? In house"),
    ("Call {name} at {key}.", "To reach {name}, call"),
    ("Note: {name} owes {key} dollars.", "How many dollars does {name} owe? {name} owes"),
    ("Account {key} belongs to {name}.", "The account that belongs to {name} is"),
    ("{name} was born on day {key}.", "{name} was born on day"),
    ("The key of {name} is {key}. Do not forget it: {key}.", "What is the key of {name}? The key of {name} is"),
    ("{key} is the magic number of {name}.", "What is the magic number of {name}? It is"),
    ("Remember that {name} won {key} coins.", "{name} won coins. How many?"),
    ("Student {name}, identity {key}.", "Student {name}, identity"),
    ("{name} put {key} stones into the bag.", "Number of stones that {name} put into the bag:"),
    ("Item: {name}; value: {key};", "Item: {name}; value:"),
    ("{name} -> {key}", "{name} ->"),
    ("In the list, {name} stands at place {key}.", "At which place of the list does {name} stand? At place"),
    ("The room of {name} is {key}, said the porter.", "Porter, which is the room of {name}? The room is"),
    ("{name} walked {key} steps today.", "How far did {name} walk today? Steps:"),
    ("PIN {key} was given to {name}.", "The PIN that was given to {name} is"),
    ('"name": "{name}", "id": {key}', '"name": "{name}", "id":'),
    ("Letter {key} was sent to {name}.", "The number of the letter that was sent to {name}:"),
)
