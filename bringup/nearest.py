"""Below the rules: the cause whose known wordings a line is nearest to, by its words and the letters in them.

Each cause is known by the samples and the text of its file and by wordings of public reports (`wordings.jsonl`); what
is harmless by such reports and by lines of healthy machines (`harmless-lines.txt`). Lines become TF-IDF vectors of
words and of runs of 3 to 5 letters within them; ridge regression on their similarities says how much each wording
speaks for each cause. So each word has a weight for a cause, and an answer can say which words led to it. Method:
https://scikit-learn.org/stable/modules/kernel_ridge.html (written out here, since it is a page of code).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
from scipy import linalg, sparse

from bringup import failures, verdicts

WORDINGS = failures.FOLDER / "wordings.jsonl"

HARMLESS = failures.FOLDER / "harmless-lines.txt"

NONE = "benign"
"""The label of wordings that look like trouble and are not."""

RIDGE = 0.3
"""How much one wording may bend the weights, of a similarity of 1 with itself."""

SURE = 0.3
"""Lead over the next cause from which a cause is named. Of 209 reports that the rules missed without their own
wording, 21 are named rightly and 3 wrongly then; at 0.2 it is 34 and 10 (bench/diagnose/crossval.py)."""

WORDS_NEEDED = 2
"""Words that must have led to a cause: one alone is in too many lines."""

PERHAPS = 0.15
"""Score from which a cause is worth a look; shown only as such."""

PERHAPS_SHOWN = 3
WORDS_SHOWN = 6
MAX_TEXT = 2_000
"""Characters of a text that are compared."""

_NUMBERS = re.compile(
    r"0x[0-9a-f]+|[0-9a-f]{8,}|https?://\S+|\d\d:\d\d:\d\d\S*|\d{4}-\d\d-\d\d|(?<![\w.])\d+(?:\.\d+)*(?!\w)"
)
_WORD = re.compile(r"[a-z][a-z0-9_+-]+|[^\x00-\x7f]")


@dataclass(frozen=True)
class Wording:
    """A text known to speak of a cause."""

    cause: str
    text: str
    source: str = ""


@dataclass(frozen=True)
class Guess:
    """A cause by its words alone: score, lead over the next cause, and the words that led there."""

    cause: str
    score: float
    lead: float
    words: tuple[str, ...]


def words_of(text: str) -> list[str]:
    """The words of a text, numbers and addresses left out."""
    return _WORD.findall(_NUMBERS.sub(" ", text.lower()[:MAX_TEXT]))


def _parts(word: str) -> list[str]:
    """A word and its runs of 3 to 5 letters; its ends count as letters."""
    padded = f" {word} "
    runs = [padded[at : at + size] for size in (3, 4, 5) for at in range(max(0, len(padded) - size + 1))]
    return [f"={word}", *runs]


class Index:
    """The wordings as vectors, and the weight of each for each cause."""

    def __init__(self, wordings: Iterable[Wording]) -> None:
        kept = [(wording, words_of(wording.text)) for wording in wordings]
        kept = [(wording, words) for wording, words in kept if words]
        counts = [Counter(part for word in words for part in _parts(word)) for _, words in kept]
        seen = Counter(part for count in counts for part in count)
        self._column = {
            part: number for number, part in enumerate(p for p, times in seen.items() if times > 1)
        }
        self._idf = [1 + math.log((1 + len(kept)) / (1 + seen[part])) for part in self._column]
        self.causes = sorted({wording.cause for wording, _ in kept})
        vectors = sparse.vstack([self._vector(count) for count in counts]).tocsr()
        place = {cause: number for number, cause in enumerate(self.causes)}
        wanted = numpy.zeros((len(kept), len(self.causes)), dtype=numpy.float32)
        wanted[range(len(kept)), [place[wording.cause] for wording, _ in kept]] = 1
        similar = (vectors @ vectors.T).toarray()
        similar[numpy.diag_indices_from(similar)] += RIDGE
        weights = linalg.solve(similar, wanted, assume_a="pos", overwrite_a=True, overwrite_b=True)
        self._weights = numpy.asarray(vectors.T @ weights)

    def _vector(self, count: Mapping[str, int]) -> Any:
        known = {self._column[part]: times for part, times in count.items() if part in self._column}
        values = [(1 + math.log(times)) * self._idf[column] for column, times in known.items()]
        length = math.sqrt(sum(value * value for value in values)) or 1
        cells = ([value / length for value in values], ([0] * len(known), list(known)))
        return sparse.csr_matrix(cells, shape=(1, len(self._column)), dtype=numpy.float32)

    def guesses(self, text: str) -> list[Guess]:
        """The nearest causes, best first; none when harmless wordings are nearer."""
        words = words_of(text)
        vector = self._vector(Counter(part for word in words for part in _parts(word)))
        scores = numpy.asarray(vector @ self._weights)[0]
        order = [int(number) for number in numpy.argsort(-scores)[: PERHAPS_SHOWN + 2]]
        named = [(self.causes[number], float(scores[number])) for number in order]
        found = []
        for number, (cause, score) in enumerate(named[:-1]):
            if cause == NONE or score < PERHAPS:
                break
            lead = score - max(named[number + 1][1], 0.0)
            found.append(Guess(cause, score, lead, self._why(words, vector, cause)))
        return found[:PERHAPS_SHOWN]

    def _why(self, words: Sequence[str], vector: Any, cause: str) -> tuple[str, ...]:
        """The words that speak for the cause, those that say most first."""
        weights = self._weights[:, self.causes.index(cause)]
        value = dict(
            zip(vector.indices.tolist(), (vector.data * weights[vector.indices]).tolist(), strict=True)
        )
        share: dict[str, float] = defaultdict(float)
        for word in dict.fromkeys(words):
            for part in _parts(word):
                share[word] += value.get(self._column.get(part, -1), 0.0)
        best = sorted(share, key=lambda word: -share[word])
        return tuple(word for word in best[:WORDS_SHOWN] if share[word] > 0.01)


def known(causes: Mapping[str, failures.Failure]) -> list[Wording]:
    """All that is known of how causes are worded. A cause that is only a note counts as harmless."""
    wordings = [Wording(NONE, line, line) for line in HARMLESS.read_text(encoding="utf-8").splitlines()]
    for line in WORDINGS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        wordings.append(Wording(row["cause"], "\n".join(row["evidence"]), row["source"]))
    for cause, failure in causes.items():
        label = NONE if failure.severity == "note" else cause
        described = f"{failure.title}. {failure.meaning} {failure.check} {failure.remedy}"
        wordings.extend(Wording(label, text, cause) for text in (described, *failure.samples))
    return wordings


def index() -> Index:
    """The shipped wordings, ready; made when first needed (about a second), again when a file has changed."""
    return _index(*failures.stamped(failures.FOLDER))


@lru_cache(maxsize=1)
def _index(folder: Path, stamp: object) -> Index:
    return Index(known(failures.load(folder)))


@dataclass(frozen=True)
class Answer:
    """What the words say where the rules named no root cause: one cause that is sure enough, or some to look at."""

    guess: Guess | None = None
    lines: tuple[verdicts.Line, ...] = ()
    perhaps: tuple[Guess, ...] = ()


def ask(
    texts: Iterable[tuple[verdicts.Line, ...]], known_texts: Index, causes: Mapping[str, failures.Failure]
) -> Answer:
    """The cause nearest to any of the texts; not one whose rule calls such a text harmless."""
    best: dict[str, tuple[Guess, tuple[verdicts.Line, ...]]] = {}
    for lines in texts:
        text = "\n".join(line.text for line in lines)
        for guess in known_texts.guesses(text):
            look_alike = causes[guess.cause].look_alike
            if look_alike and look_alike.search(text):
                continue
            if guess.cause not in best or guess.lead > best[guess.cause][0].lead:
                best[guess.cause] = guess, lines
    ranked = sorted(best.values(), key=lambda item: (-item[0].lead, -item[0].score))
    if ranked and ranked[0][0].lead >= SURE and len(ranked[0][0].words) >= WORDS_NEEDED:
        return Answer(*ranked[0])
    return Answer(perhaps=tuple(guess for guess, _ in ranked[:PERHAPS_SHOWN]))
