"""Combinations in which each pair of values of two dimensions occurs, if the program accepts it.

covering_array.json has them, and the pairs that are refused. `make covering` deals them anew.
"""

import itertools
import random
from collections import Counter
from pathlib import Path

from combinations import DIMENSIONS, SIMPLEST, Refused, ranks_of
from world import read_json

FILE = Path(__file__).with_name("covering_array.json")
TRIES = 3
"""Number of combinations of which the one is taken that covers most pairs."""


def choices(name):
    """Return each value of a dimension, as the dimension and the number of the value."""
    return [(name, number) for number in range(len(DIMENSIONS[name]))]


def all_pairs():
    """Return all pairs of values of two dimensions, those of the largest dimensions first."""
    return [
        frozenset(pair)
        for one, other in sorted(
            itertools.combinations(DIMENSIONS, 2),
            key=lambda names: -len(DIMENSIONS[names[0]]) * len(DIMENSIONS[names[1]]),
        )
        for pair in itertools.product(choices(one), choices(other))
    ]


def numbers_of(combination):
    """Return the number of each dimension's value."""
    return {
        name: number
        for name, words in combination.items()
        for number, value in enumerate(DIMENSIONS[name])
        if words in value
    }


def pairs_of(combination):
    """Return the pairs of values that occur in a combination."""
    chosen = numbers_of(combination).items()
    return {frozenset(pair) for pair in itertools.combinations(chosen, 2)}


class Dealer:
    """Deals combinations that the program accepts until each pair has occurred.

    accepts: raises Refused for a combination. `refused` lists the pairs that are not accepted with
    the simplest values of all other dimensions, nor with another family.
    """

    def __init__(self, seed, accepts):
        self.random = random.Random(seed)
        self.accepts = accepts
        self.uncovered = dict.fromkeys(all_pairs())  # in order, and quick to look up
        self.refused = set()
        self.dealt = Counter()

    def deal(self):
        """Yield combinations: first those that cover pairs, then those with other ways to write."""
        yield from self.deal_pairs()
        for name, values in DIMENSIONS.items():
            for words in itertools.chain(*values):
                if words not in self.dealt and (one := self.with_words({name: words})):
                    yield one

    def deal_pairs(self):
        while self.uncovered:
            first = next(iter(self.uncovered))
            del self.uncovered[first]
            if combination := self.with_pair(first):
                others = {n: number for n, number in numbers_of(combination).items() if number}
                tries = [self.filled(combination, others | dict(first)) for _ in range(TRIES)]
                combination = max(tries, key=lambda one: len(self.uncovered.keys() & pairs_of(one)))
                self.dealt.update(combination.values())
                for pair in pairs_of(combination):
                    self.uncovered.pop(pair, None)
                yield combination
            else:
                self.refused.add(first)

    def with_pair(self, pair):
        """Return the simplest combination with a pair, or None if all of its ways are refused."""
        one, other = sorted(pair)
        for words, others in itertools.product(self.ways(one), self.ways(other)):
            if combination := self.with_words({one[0]: words, other[0]: others}):
                return combination
        return None

    def with_words(self, words):
        """Return the simplest combination with some words, or None if it is refused.

        Some need another family than the simplest, as a layout of experts, or more blocks.
        """
        names = [name for name in ("family", "blocks") if name not in words]
        thirds = [{}, *({name: way[0]} for name in names for way in DIMENSIONS[name])]
        tries = (SIMPLEST | third | words for third in thirds)
        return next(filter(self.is_accepted, tries), None)

    def filled(self, combination, numbers):
        """Return a combination with the values that add most pairs. numbers: those it has."""
        names = [name for name in DIMENSIONS if name not in numbers]
        self.random.shuffle(names)
        for name in sorted(names, key=lambda name: -len(DIMENSIONS[name])):
            wanted = [choice for choice in choices(name) if self.gain(choice, numbers)]
            self.random.shuffle(wanted)
            for choice in sorted(wanted, key=lambda choice: -self.gain(choice, numbers)):
                tries = (combination | {name: words} for words in self.ways(choice))
                if accepted := next(filter(self.is_accepted, tries), None):
                    combination = accepted
                    numbers = numbers | {name: choice[1]}
                    break
        return combination

    def gain(self, choice, numbers):
        """Return how many pairs a value adds; 0 if one is refused."""
        pairs = [frozenset((choice, other)) for other in numbers.items()]
        if any(pair in self.refused for pair in pairs):
            return 0
        return sum(pair in self.uncovered for pair in pairs)

    def ways(self, choice):
        """Return the ways to write a value, first that of the fewest ranks in all runs so far."""
        ways = DIMENSIONS[choice[0]][choice[1]]
        return sorted(ways, key=lambda words: self.dealt[words] * ranks_of(words.split()))

    def is_accepted(self, combination):
        try:
            self.accepts(combination)
        except Refused:
            return False
        return True


def stored():
    """Return the combinations of the file."""
    return [SIMPLEST | row for row in read_json(FILE)["combinations"]]


def refused():
    """Return the pairs that the file lists as refused."""
    return {
        frozenset((name, number) for name, number in pair) for pair in read_json(FILE)["refused"]
    }
