"""Prompts that come with the package, from which a drafter learns if there is no traffic yet: six kinds of requests, each a
sentence pattern filled with subjects. They share no sentence with bench/prompts, on which drafters are measured."""

from __future__ import annotations

from collections.abc import Iterator

TOPICS = (
    *(
        "the tides",
        "volcanoes",
        "bread making",
        "the water cycle",
        "honey bees",
        "solar panels",
        "the printing press",
        "glaciers",
    ),
    *("chess openings", "coral reefs", "railways", "the human heart", "clouds", "paper recycling", "folk music", "wind turbines"),
    *("the moon", "city parks", "sleep", "ancient Rome", "vaccines", "bicycles", "tea", "lighthouses", "migrating birds", "rice"),
    *(
        "electric cars",
        "forests",
        "the alphabet",
        "maps",
        "budgeting",
        "public libraries",
        "running",
        "soil",
        "whales",
        "bridges",
    ),
)
ASKS = (
    "Explain {t} in a few sentences.",
    "What are the most common misconceptions about {t}?",
    "Give me five interesting facts about {t}.",
    "Write a short story in which {t} plays a role.",
    "How did people come to understand {t}?",
    "Write a friendly e-mail that invites a colleague to a talk about {t}.",
    "Compare {t} and {u}.",
    "I know nothing about {t}. Where should I start?",
    "Summarise the advantages and disadvantages of {t}.",
)
TASKS = (
    *("merges two sorted lists", "counts the vowels of a string", "finds the longest word of a sentence", "parses a date"),
    *(
        "removes duplicates and keeps the order",
        "computes the median",
        "checks whether brackets are balanced",
        "reads a CSV file",
    ),
    *("groups words by their first letter", "rotates a matrix", "formats a number of bytes", "validates an e-mail address"),
    *("finds the shortest path in a graph", "flattens a nested list", "retries a request", "computes a checksum of a file"),
)
LANGUAGES = ("Python", "JavaScript", "Go", "Rust", "C", "Java")
CODE_ASKS = (
    "Write a {l} function that {c}.",
    "Write unit tests in {l} for a function that {c}.",
    "Explain step by step how a {l} function that {c} would work, then show it.",
)
SNIPPETS = (
    "def total(prices):\n    result = 0\n    for price in prices:\n        result = result + price\n    return result",
    "class Counter:\n    def __init__(self):\n        self.count = 0\n\n    def add(self, n):\n        self.count += n",
    "function greet(name) {\n  if (name) {\n    return 'Hello ' + name;\n  }\n  return 'Hello';\n}",
    "def load(path):\n    f = open(path)\n    text = f.read()\n    f.close()\n    return text.split('\\n')",
    "for (int i = 0; i < n; i++) {\n  if (values[i] > best) {\n    best = values[i];\n  }\n}",
    "def area(shape, a, b=None):\n    if shape == 'circle':\n        return 3.14 * a * a\n    return a * b",
)
EDITS = (
    "Rename the variables so that they are easier to read:\n\n```\n{s}\n```",
    "Add type hints or types and a short comment to this code:\n\n```\n{s}\n```",
    "Rewrite this code so that it handles empty input, and print the whole result:\n\n```\n{s}\n```",
    "Add logging to this code and change nothing else:\n\n```\n{s}\n```",
)
PASSAGES = (
    "The market opens at seven, but the bakers arrive at four. By the time the first customers come, the square smells of bread "
    "and the stalls are full. At noon the sellers pack up, and by one the square is empty again.",
    "Sound travels faster in water than in air, because the molecules of water are closer together. A whale's call can therefore "
    "be heard over hundreds of kilometres, while a shout on land fades within one.",
    "The library lends tools as well as books. Members may take a drill for three days, a ladder for one. Whoever returns a tool "
    "late pays nothing, but cannot borrow another until the next week.",
    "In the spring of that year the river rose twice. The first flood took the footbridge; the second took the mill. The village "
    "rebuilt the bridge in stone, and the miller moved up the hill.",
)
QUOTES = (
    "Read this text and answer with the sentence that names a number or a time, word for word:\n\n{s}",
    "Repeat this text exactly, then summarise it in one sentence:\n\n{s}",
    "Correct the style of this text with as few changes as you can:\n\n{s}",
    "List the facts of this text as bullet points, in its own words:\n\n{s}",
)
OBJECTS = (
    "a book",
    "a customer order",
    "a train connection",
    "a recipe",
    "a weather report",
    "a software bug",
    "a hotel room",
    "a film",
)
JSON_ASKS = (
    "Describe {o} as a JSON object with six fields. Answer with JSON only.",
    "Write a JSON schema for {o}.",
    "Return a JSON array with three examples of {o}. Each has an id, a name and two more fields.",
    'Call the function search with arguments for {o}. Answer with JSON of the form {{"name": …, "arguments": {{…}}}}.',
)
SUMS = (
    "A shop sells {a} apples a day at {b} cents each. What does it take in over {c} days? Show the steps.",
    "Compute {a} * {b} + {c}, step by step.",
    "A train covers {a} kilometres in {c} hours. How far does it go in {b} minutes?",
    "Solve for x: {c}x + {b} = {a}. Show each step.",
    "{a} books are packed into boxes of {b}. How many boxes are full, and how many books are left over?",
)


def builtin_prompts() -> Iterator[tuple[str, str]]:
    """Return all prompts with their kinds, always in the same order, in which prompts of all kinds alternate."""
    kinds = {"chat": _chat(), "code": _code(), "edit": _filled(EDITS, SNIPPETS), "quote": _filled(QUOTES, PASSAGES)}
    kinds |= {"json": _json(), "math": _math()}
    while kinds:
        for kind, prompts in list(kinds.items()):
            text = next(prompts, None)
            if text is None:
                del kinds[kind]
            else:
                yield kind, text


def _chat() -> Iterator[str]:
    for turn in range(len(TOPICS)):
        for number, ask in enumerate(ASKS):
            topic = TOPICS[(turn + 5 * number) % len(TOPICS)]
            yield ask.format(t=topic, u=TOPICS[(turn + 5 * number + 11) % len(TOPICS)])


def _code() -> Iterator[str]:
    for turn, task in enumerate(TASKS):
        for number, language in enumerate(LANGUAGES):
            yield CODE_ASKS[(turn + number) % len(CODE_ASKS)].format(l=language, c=task)


def _filled(patterns: tuple[str, ...], texts: tuple[str, ...]) -> Iterator[str]:
    for pattern in patterns:
        for text in texts:
            yield pattern.replace("{s}", text)


def _json() -> Iterator[str]:
    for ask in JSON_ASKS:
        for thing in OBJECTS:
            yield ask.format(o=thing)


def _math() -> Iterator[str]:
    for turn in range(12):
        for number, pattern in enumerate(SUMS):
            yield pattern.format(a=60 + 37 * turn + number, b=3 + 2 * ((turn + number) % 9), c=2 + (turn * 3 + number) % 7)
