"""Prompts of several kinds, for a model that is to write its own training text: chat, code, rewriting, prose."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KINDS = ("chat", "code", "rewrite", "prose")
HELD_OUT = 8  # every so many-th subject is asked only where a trained layer is measured

SUBJECTS = (
    "bread", "volcanoes", "the moon", "chess", "whales", "the printing press", "bicycles", "coral reefs", "jazz",
    "earthquakes", "honey bees", "the Silk Road", "photosynthesis", "glaciers", "coffee", "the human heart", "opera",
    "solar panels", "ancient Rome", "penguins", "inflation", "vaccines", "tea", "the ocean tides", "dreams", "gravity",
    "the Great Wall", "mushrooms", "running", "the internet", "spiders", "water", "elections", "paper", "black holes",
    "migrating birds", "cheese", "steam engines", "desert plants", "memory", "painting", "the Amazon river", "sleep",
    "lightning", "sailing", "the brain", "maps", "wolves", "the periodic table", "castles", "rice", "cinema", "bridges",
    "rainbows", "time zones", "gardening", "the Olympics", "antibiotics", "clocks", "elephants", "soap", "democracy",
    "the violin", "compost", "diamonds", "hurricanes", "public libraries", "electric cars", "fossils", "swimming",
    "the stock market", "yoga", "cats", "railways", "bacteria", "poetry", "the Arctic", "salt", "robots", "football",
    "dinosaurs", "stars", "wool", "airports", "cooking oil", "languages", "the immune system", "mountains", "radio",
    "forests", "budgeting", "horses", "glass", "satellites", "the French Revolution", "potatoes", "snow", "museums",
    "batteries", "friendship", "caves", "the alphabet", "butterflies", "tunnels", "marathons", "rivers", "comets",
)  # fmt: skip
QUESTIONS = (
    "What is interesting about {s}?", "Explain {s} to a child.", "Write a short paragraph about {s}.",
    "List five facts about {s}.", "Why does {s} matter?", "Give me three questions and answers about {s}.",
    "How did people think about {s} a hundred years ago?", "What are common mistakes about {s}?",
    "Summarize what you know of {s} in two sentences.", "What should a beginner know about {s}?",
    "Write an email to a colleague about {s}.", "Make a plan for a lesson about {s}, step by step.",
    "Compare {s} with {t}.", "What are the advantages and disadvantages of {s}?", "Define {s}.",
    "Write a quiz about {s} with answers.", "Describe {s} in detail.", "What has {s} to do with {t}?",
)  # fmt: skip
STORIES = (
    "Tell me a story about {s}.", "Write a poem about {s}.", "Tell me a long story about a girl who loves {s}.",
    "Write the first chapter of a novel about {s} and {t}.", "Write a dialogue between two friends about {s}.",
    "Describe a day in a village that is famous for {s}.", "Tell a tale of an old man, {s} and {t}.",
    "Write a letter from a traveller who has seen {s}.", "Write an essay about {s}.", "Tell me a fairy tale with {s}.",
)  # fmt: skip
OPENINGS = (
    "It was a cold morning, and nobody had thought of {s} yet.", "The history of {s} begins",
    "There once was a teacher who knew everything about {s}.", "Most people believe that {s}",
    "In this article we look at {s}.", "Chapter 1. The year in which {s}",
    "She opened the box. Inside was a note on {s}:",
)  # fmt: skip
PROGRAMS = (
    "reverses a string", "checks whether a number is prime", "sorts a list with bubble sort", "counts words in a text",
    "finds the largest number in a list", "computes the factorial of n", "removes duplicates from a list",
    "computes Fibonacci numbers", "searches a sorted list by halves", "merges two dictionaries", "adds two matrices",
    "checks whether a word is a palindrome", "converts Celsius to Fahrenheit", "reads a CSV file", "keeps a stack",
    "flattens a nested list", "computes the mean and the median", "counts vowels", "parses a date", "checks an email",
    "prints a triangle of stars", "finds the greatest common divisor", "groups words by their first letter",
    "computes compound interest", "walks a binary tree", "downloads a page", "shuffles cards", "rotates a matrix",
    "simulates a bank account", "converts numbers to Roman numerals", "finds anagrams", "caches results of a function",
    "implements a queue", "implements a linked list", "counts lines of a file", "writes JSON", "cuts a list up",
    "computes a running sum", "finds missing numbers", "measures time", "generates passwords", "logs messages",
)  # fmt: skip
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "SQL", "Bash")
CODE = (
    "Write a {l} function that {p}.", "Write a {l} program that {p}, with comments.", "How do I write {l} that {p}?",
    "Write a {l} class that {p}, and an example.", "Show me two ways to write {l} that {p}.",
)  # fmt: skip
CHANGES = (
    "Rewrite this code. Rename `{a}` to `{b}`.", "Add comments to this code.", "Repeat this code, with type hints.",
    "Fix mistakes in this code and print all of it.", "Rewrite this code with longer names.",
)  # fmt: skip
BEGUN = (
    "",
    "Here is the code with the new name:\n```python\n",
    "```python\n",
    "Here is the code:\n```python\n",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """said: a user's message, or with `raw` the text itself. begun: how the answer begins."""

    kind: str
    said: str
    begun: str = ""
    raw: bool = False


def prompts(seed: int, sources: Path, *, held_out: bool = False) -> Iterator[Prompt]:
    """Endless, each kind in turn. sources: a folder of Python files, whose functions are to be rewritten."""
    chance = random.Random(seed)
    subjects, programs = _part(SUBJECTS, held_out), _part(PROGRAMS, held_out)
    functions = _part(_functions(sources), held_out)
    while True:
        s, t = chance.sample(subjects, 2)
        yield Prompt("chat", chance.choice(QUESTIONS).format(s=s, t=t))
        program, language = chance.choice(programs), chance.choice(LANGUAGES)
        yield Prompt("code", chance.choice(CODE).format(l=language, p=program))
        yield _rewrite(chance, chance.choice(functions))
        if chance.random() < 0.2:
            yield Prompt("prose", chance.choice(OPENINGS).format(s=s), raw=True)
        else:
            yield Prompt("prose", chance.choice(STORIES).format(s=t, t=s))


def _part(all_: tuple[str, ...], held_out: bool) -> list[str]:
    return [each for i, each in enumerate(all_) if (i % HELD_OUT == 0) == held_out]


def _rewrite(chance: random.Random, code: str) -> Prompt:
    names = sorted({node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}) or ["x"]
    change = chance.choice(CHANGES).format(
        a=chance.choice(names), b=chance.choice(("value", "item", "speed", "total"))
    )
    return Prompt("rewrite", f"{change}\n```python\n{code}\n```", chance.choice(BEGUN))


def _functions(sources: Path) -> tuple[str, ...]:
    """Functions of 6 to 30 lines."""
    found = []
    for file in sorted(sources.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and 6 <= (node.end_lineno or 0) - node.lineno <= 30:
                found.append(ast.get_source_segment(text, node) or "")
    return tuple(found)
