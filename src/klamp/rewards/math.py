"""``math``: is the final answer of a text the gold answer? Exactly where both are numbers, else by math-verify."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from klamp.answers import (
    Found,
    find,
    formula,
    has_words,
    plain,
    plain_number,
    spelled,
    split_base,
    split_percent,
    words,
)
from klamp.answers.numbers import LONGEST
from klamp.rewards.base import BUDGET, TIME_LIMIT, Columns, Reward, Verdict, gold_text
from klamp.rewards.comparison import same
from klamp.rewards.extracting import Extractor
from klamp.worker import WORKER, Outcome

RULES_VERSION = 2  # of the rules in this room and in klamp.answers: raise it when a verdict may change
CACHE_SIZE = 65_536

Pair = tuple[str, str, int, int]  # gold, answer, and what each is divided by


class Cache:
    """What became of each comparison, by (gold, answer, version); the oldest of ``size`` go first."""

    def __init__(self, size: int = CACHE_SIZE) -> None:
        self.size = size
        self._found: OrderedDict[tuple[Pair, str], Outcome] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, pair: Pair) -> Outcome | None:
        with self._lock:
            return self._found.get((pair, version()))

    def put(self, pair: Pair, outcome: Outcome) -> None:
        with self._lock:
            self._found[pair, version()] = outcome
            while len(self._found) > self.size:
                self._found.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._found.clear()

    def __len__(self) -> int:
        return len(self._found)


CACHE = Cache()


@functools.cache
def version() -> str:
    """Of everything that a comparison depends on."""
    parts = (f"{name} {importlib.metadata.version(name)}" for name in ("math-verify", "latex2sympy2-extended", "sympy"))
    return "; ".join((f"rules {RULES_VERSION}", *parts))


@dataclass(frozen=True)
class Gold:
    """A gold answer: a number, words or a formula, without its percent sign."""

    text: str
    reading: Literal["number", "words", "formula"]
    percent: bool = False
    number: Fraction | None = None

    @classmethod
    def read(cls, text: str) -> Gold | None:
        """None if there is nothing in it that can be compared."""
        given = _formula_of(text) or ""
        for candidate in (text, given):
            body, percent = split_percent(candidate)
            if (number := plain_number(body)) is not None:
                return cls(body, "number", percent, number)
        if words(text):
            return cls(text, "words")
        body, percent = split_percent(given)
        return cls(body, "formula", percent) if body and len(body) <= LONGEST else None


def _formula_of(text: str) -> str | None:
    """The formula that a gold answer is, or that a solution marks as its answer; a number in running text is none."""
    found = find(text)
    prose = found is not None and not found.marked and "\\" not in text and "$" not in text and has_words(text)
    return None if found is None or prose else formula(found)


class MathReward(Reward):
    """1 for the gold answer, 0 for another or none, None where the gold answer cannot be read or does not equal itself.

    A comparison has ``limit`` seconds in a process that is killed when late (0, counted in timeouts); a call has
    ``budget`` seconds in all (what is undecided then is unscored, counted in late).
    """

    def __init__(
        self, name: str = "math", *, extract: str = "auto", limit: float = TIME_LIMIT, budget: float = BUDGET
    ) -> None:
        super().__init__(name)
        self.limit, self.budget = limit, budget
        self.extractor = Extractor(extract, limit)

    def judge(self, prompts: Sequence[str], texts: Sequence[str], columns: Columns) -> list[Verdict]:
        golds = {text: Gold.read(text) for text in map(gold_text, columns["answer"])}
        rows = [
            _Row(golds[gold_text(gold)], found, prompt)
            for gold, found, prompt in zip(columns["answer"], self.extractor(texts), prompts, strict=True)
        ]
        wanted = list(dict.fromkeys(pair for row in rows for pair in row.pairs))
        known = {pair: outcome for pair in wanted if (outcome := CACHE.get(pair))}
        asked = [pair for pair in wanted if pair not in known]
        outcomes = WORKER.map(same, asked, library="math_verify", limit=self.limit, budget=self.budget)
        fresh = dict(zip(asked, outcomes, strict=True))
        for pair, outcome in fresh.items():
            slow = outcome.kind == "timeout" and pair[0] == pair[1]  # a gold answer, perhaps on a busy machine
            if outcome.kind not in ("late", "lost") and not slow:
                CACHE.put(pair, outcome)
        return [row.verdict(known | fresh, known) for row in rows]


class _Row:
    """One completion: what can be said at once, and which comparisons decide the rest."""

    def __init__(self, gold: Gold | None, found: Found | None, prompt: str) -> None:
        self.gold = gold
        self.answer = None if found is None else formula(found)
        self.now: Verdict | None = None
        self.pairs: list[Pair] = []  # one that is true is enough
        self.proof: Pair | None = None  # the gold answer equals itself
        if gold is None:
            self.now = Verdict(None, "bad_gold", self.answer)
        elif gold.reading == "words":
            self._spell(gold.text, found)
        else:
            if gold.reading == "formula":
                self.proof = (gold.text, gold.text, 1, 1)
                self.pairs.append(self.proof)
            self._calculate(gold, prompt)

    def _spell(self, gold: str, found: Found | None) -> None:
        text = None if found is None else found.text
        if text is not None and spelled(text) == spelled(gold):
            self.now = Verdict(1.0, "", text)
        elif self.answer and gold.isalpha() and len(self.answer) <= LONGEST:  # it may be a product: abc and bca
            self.pairs.append((gold, self.answer, 1, 1))
        else:
            self.now = Verdict(0.0, "" if text else "no_answer", text)

    def _calculate(self, gold: Gold, prompt: str) -> None:
        if self.answer is None:
            self.now = Verdict(0.0, "no_answer")
            return
        body, percent = split_percent(self.answer)
        scales = [(100 if gold.percent and not percent else 1, 100 if percent and not gold.percent else 1)]
        if gold.percent != percent and (gold.percent or asks_for_percent(prompt)):
            scales.append((1, 1))  # the sign is the unit that the other side leaves out
        number = plain_number(body)
        if (split_base(gold.text) or split_base(body)) and not gold.percent | percent:
            self.now = Verdict(float(_same_in_base(gold.text, body)), "", self.answer)
            self.pairs, self.proof = [], None
        elif gold.number is not None and number is not None:
            equal = any(gold.number * below == number * above for above, below in scales)
            self.now = Verdict(float(equal), "", self.answer)
        elif plain(body) == plain(gold.text) and (1, 1) in scales:
            self.now = Verdict(1.0, "", self.answer)
        elif len(body) > LONGEST or (gold.number is not None and not re.search(r"[0-9\\]", body)):
            self.now = Verdict(0.0, "", self.answer)
        else:
            self.pairs += [(gold.text, body, *scale) for scale in scales]

    def verdict(self, outcomes: Mapping[Pair, Outcome], known: Mapping[Pair, Outcome]) -> Verdict:
        """The verdict from what became of the comparisons; ``known`` were in the cache."""
        cached = bool(self.pairs) and all(pair in known for pair in self.pairs)
        if self.proof:
            proof = outcomes[self.proof]
            if proof.kind in ("late", "lost"):
                return Verdict(None, proof.kind, self.answer)
            if not _holds(proof):
                return Verdict(None, "bad_gold", self.answer, cached)
        if self.now:
            return replace(self.now, cached=cached)
        found = [outcomes[pair] for pair in self.pairs if pair != self.proof]
        if any(map(_holds, found)):
            return Verdict(1.0, "", self.answer, cached)
        kinds = {outcome.kind for outcome in found}
        for kind in ("late", "lost"):
            if kind in kinds:
                return Verdict(None, kind, self.answer)
        reason = "timeouts" if "timeout" in kinds else "errors" if "error" in kinds else ""
        return Verdict(0.0, reason, self.answer, cached)


def _holds(outcome: Outcome) -> bool:
    return outcome.kind == "done" and outcome.value is True


def _same_in_base(gold: str, answer: str) -> bool:
    """Equal values, or equal digits where one side leaves its base out."""
    sides = [split_base(gold), split_base(answer)]
    if all(sides):
        values = {int(*side) for side in sides if side}
        return len(values) == 1
    digits, bare = (sides[0], answer) if sides[0] else (sides[1], gold)
    assert digits is not None
    return digits[0] == (bare.strip().strip("$").strip().lstrip("0").upper() or "0")


def asks_for_percent(prompt: str) -> bool:
    """Whether the last question of a prompt, or its last sentences if there is none, speak of percent."""
    sentences = re.split(r"(?<=[.?!])\s+", prompt[-5000:])
    questions = [sentence for sentence in sentences if "?" in sentence][-1:] or sentences[-2:]
    return any(re.search(r"percent|%", sentence, re.IGNORECASE) for sentence in questions)


def verify(*, gold: str, answer: str, prompt: str = "", **options: Any) -> Verdict:
    """The verdict of ``math`` on one text. Arguments by name, because a comparison is not symmetric.

    ``options`` are those of the reward: extract, limit, budget.
    """
    return MathReward(**options).verdicts([prompt], [answer], answer=[gold])[0]
