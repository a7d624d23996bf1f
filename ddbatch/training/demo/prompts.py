"""The demo's prompts: combinations of some words for training, and a few that are kept out of it.

Knows nothing about models.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import product

PLACES = """an old library|a small harbor|a village market|a quiet beach|a mountain lake
a train station|a pine forest|a farm kitchen|a rose garden|a night market|an empty theater
a bakery|a lighthouse|a wooden bridge|a city park|a desert road|a fishing boat|a snowy street
a school yard|a castle tower|a hidden cave|a river bank|a tea house|a flower shop|a stone church
a busy cafe|a country house|a windmill|an apple orchard|a music hall|a toy shop|a barn|a rooftop
a workshop|a narrow alley|a waterfall|a hill above the town|a greenhouse|an island|a campfire"""
TIMES = """at dawn|in the morning|at noon|in the late afternoon|at sunset|in the evening|at night
at midnight|on a rainy day|on a foggy morning|after a storm|in the first snow|in spring|in summer
in autumn|in winter|on a windy day|on a holiday|on a hot day|on a quiet Sunday"""
CHARACTERS = """a young fox|an old sailor|a shy baker|a brave girl|a curious boy|a tired king
a clever crow|a lonely giant|a kind nurse|a small dragon|a clumsy wizard|a retired teacher
a gentle bear|a young painter|a poor farmer|a lost puppy|a wise owl|a busy tailor|a proud cat
a quiet gardener|a mouse|a traveling musician|a little robot|a fisherman|a forgetful clockmaker
a librarian|a runaway prince|a stubborn goat|a dancer|a night guard|a beekeeper|a blind carpenter
a cheerful cook|a street singer|a young astronaut|a postman|a white horse|a turtle|a woodcutter
a grandmother"""
EVENTS = """finds a silver key|gets lost in the fog|hears a strange song|meets an old friend
wants to learn to fly|receives a letter with no name|plants a magic seed|is afraid of the dark
builds a boat|follows a blue light|finds a hidden door|loses a favorite hat|saves a small bird
makes a promise|wins a race|discovers a map|cannot sleep|travels to the sea|learns to dance
wakes up in a strange town|finds a box of old photos|waits for the first snow|keeps a secret
repairs an old clock|sees a falling star|shares the last piece of bread|climbs the highest hill
talks to the moon|has to choose a new home|gets a second chance"""
THINGS = """the sea|the moon|an old clock|a red umbrella|a loaf of bread|a letter|the first snow
a wooden chair|a long journey|a garden|friendship|silence|a bicycle|a cup of tea|the wind|a mirror
a lantern|an oak tree|a violin|home|a stone wall|a map|the night sky|a pair of boots|a summer storm
a blue door|a train|a kite|winter|music|a river|courage|an empty house|a photograph|a candle
patience|a feather|a key|a market|a dream"""
STYLES = """in simple words|in a warm tone|as a memory|in a calm voice|with great detail
as if you were there"""

# Short ones are the demo's, and the teacher answers each several times, with a temperature.
_SHORT = (
    ("Describe {} {} in a few sentences.", (PLACES, TIMES)),
    ("Write the beginning of a short story about {} who {}.", (CHARACTERS, EVENTS)),
    ("Write a few sentences about {}, {}.", (THINGS, STYLES)),
    ("Write a few sentences about {} and {}.", (CHARACTERS, THINGS)),
)
# Long ones are many, and the teacher answers each once, greedily: its most usual words.
_LONG = (
    ("Describe {} {}, {}.", (PLACES, TIMES, STYLES)),
    ("Write the beginning of a short story about {} who {} {}.", (CHARACTERS, EVENTS, TIMES)),
    ("Write a few sentences about {} and {}, {}.", (CHARACTERS, THINGS, STYLES)),
    ("Write the beginning of a short story about {} and {} {}.", (CHARACTERS, THINGS, TIMES)),
)

_NUM_EMBEDDED = 24  # what the demo decodes, and no training sees


def embedded_prompts() -> list[str]:
    """The demo's own prompts."""
    return _combined(_SHORT)[:_NUM_EMBEDDED]


def short_prompts() -> list[str]:
    """All short ones but the embedded."""
    return _combined(_SHORT)[_NUM_EMBEDDED:]


def long_prompts() -> list[str]:
    """Some ten thousands."""
    return _combined(_LONG)


def _combined(kinds: Iterable[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Every combination, in an order that mixes the kinds and is always the same."""
    found = [
        template.format(*words)
        for template, lists in kinds
        for words in product(*(text.replace("\n", "|").split("|") for text in lists))
    ]
    random.Random(0).shuffle(found)
    return found
