"""An answer's way through what it has to be: free thoughts, then a forced token or two, then a grammar, and so on.

Each phase is a stack of tokens that can be taken back, across any border. Knows ids, no logits and no request.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Allowed = NDArray[np.bool_]
UNBOUNDED = sys.maxsize


class Phase(Protocol):
    """A part of an answer, as tokens go into it one by one."""

    @property
    def failure(self) -> str | None:
        """Why it cannot go on, in one line, if it cannot."""

    @property
    def accepts(self) -> bool:
        """It may end here."""

    @property
    def finished(self) -> bool:
        """Nothing more goes into it."""

    @property
    def slack(self) -> int:
        """How many tokens, whatever they are, nothing need be known of: all may come, ends of text too."""

    def allowed(self) -> Allowed | None:
        """Which ids of text may come next: bool [vocabulary of the tokenizer]. None: every id, ends of text too."""

    def advance(self, token: int) -> bool:
        """Take one token; False, and no change, where it is not allowed."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens taken."""

    def forced(self) -> list[int]:
        """Tokens that must come next."""


class Matcher(Phase, Protocol):
    """What a whole answer has to be."""

    @property
    def ends(self) -> frozenset[int]:
        """Ids that are the model's own end of text."""


class Free:
    """Any tokens, up to and including `until`, which is forced after `most` others.

    `banned` may not come: the ends of text, say, where an answer may not end in here. `on`: it goes on after `until`,
    at rest.
    """

    def __init__(
        self,
        size: int,
        until: int | None = None,
        most: int | None = None,
        banned: frozenset[int] = frozenset(),
        *,
        on: bool = False,
    ) -> None:
        """`size`: of the tokenizer's vocabulary. `most` needs `until`."""
        self._size, self._until, self._most, self._banned, self._on = size, until, most, banned, on
        self._taken = 0
        self._before: int | None = None  # how many came before `until`, once it has come

    failure = None

    @property
    def accepts(self) -> bool:
        return self.finished or not (self._banned or self.forced())

    @property
    def finished(self) -> bool:
        return self._before is not None and not self._on

    @property
    def slack(self) -> int:
        if self._banned or self.finished:
            return 0
        if self._before is not None or self._until is None:
            return UNBOUNDED
        if not self._on:
            return 0
        return UNBOUNDED if self._most is None else max(self._most - self._taken, 0)

    def allowed(self) -> Allowed | None:
        if self.finished:
            return _ids(self._size, ())
        if forced := self.forced():
            return _ids(self._size, forced)
        return ~_ids(self._size, self._banned) if self._banned else None

    def advance(self, token: int) -> bool:
        if self.finished or not 0 <= token < self._size or token in self._banned:
            return False
        if (forced := self.forced()) and token not in forced:
            return False
        if token == self._until and self._before is None:
            self._before = self._taken
        self._taken += 1
        return True

    def rollback(self, count: int) -> None:
        self._taken -= count
        if self._before is not None and self._taken <= self._before:
            self._before = None

    def forced(self) -> list[int]:
        if self._until is None or self._most is None or self._before is not None or self._taken < self._most:
            return []
        return [self._until]


class Fixed:
    """These tokens and no others."""

    def __init__(self, size: int, tokens: Sequence[int]) -> None:
        """`size`: of the tokenizer's vocabulary."""
        self._size, self._tokens, self._taken = size, tuple(tokens), 0

    failure = None
    slack = 0

    @property
    def accepts(self) -> bool:
        return self.finished

    @property
    def finished(self) -> bool:
        return self._taken == len(self._tokens)

    def allowed(self) -> Allowed:
        return _ids(self._size, self.forced()[:1])

    def advance(self, token: int) -> bool:
        if self.forced()[:1] != [token]:
            return False
        self._taken += 1
        return True

    def rollback(self, count: int) -> None:
        self._taken -= count

    def forced(self) -> list[int]:
        return list(self._tokens[self._taken :])


class Either:
    """One of two, told apart by the first token: `mark` begins the other."""

    def __init__(self, one: Phase, other: Phase, mark: int) -> None:
        """`one` allows neither everything nor `mark`; `other` begins with it."""
        self._one, self._other, self._mark = one, other, mark
        self._way: Phase | None = None
        self._taken = 0

    slack = 0

    @property
    def failure(self) -> str | None:
        return (self._way or self._one).failure

    @property
    def accepts(self) -> bool:
        return (self._way or self._one).accepts

    @property
    def finished(self) -> bool:
        return self._way is not None and self._way.finished

    def allowed(self) -> Allowed | None:
        if self._way is not None:
            return self._way.allowed()
        allowed = self._one.allowed()
        if allowed is not None:
            allowed[self._mark] = True
        return allowed

    def advance(self, token: int) -> bool:
        way = self._way or (self._other if token == self._mark else self._one)
        if not way.advance(token):
            return False
        self._way = way
        self._taken += 1
        return True

    def rollback(self, count: int) -> None:
        if self._way is not None:
            self._way.rollback(count)
            self._taken -= count
            self._way = self._way if self._taken else None

    def forced(self) -> list[int]:
        return self._way.forced() if self._way is not None else []


class Phases:
    """Phases one after the other, each begun when the one before it is finished. The whole of an answer."""

    def __init__(self, ends: frozenset[int], phases: Sequence[Callable[[], Phase]], again: int | None = None) -> None:
        """`again`: after the last comes this one once more, and so on."""
        self.ends = ends
        self._makers, self._again = phases, again
        self._begun: list[Phase] = [phases[0]()]
        self._taken = [0]  # by each
        self._at = [0]  # which each one is
        self._begin_next()

    @property
    def failure(self) -> str | None:
        return self._now.failure

    @property
    def accepts(self) -> bool:
        return self._now.accepts

    @property
    def finished(self) -> bool:
        return self._now.finished

    @property
    def slack(self) -> int:
        return self._now.slack

    def allowed(self) -> Allowed | None:
        return self._now.allowed()

    def advance(self, token: int) -> bool:
        if not self._now.advance(token):
            return False
        self._taken[-1] += 1
        self._begin_next()
        return True

    def rollback(self, count: int) -> None:
        while count > self._taken[-1]:
            count -= self._taken[-1]
            del self._begun[-1], self._taken[-1], self._at[-1]
        self._now.rollback(count)
        self._taken[-1] -= count

    def forced(self) -> list[int]:
        """Beyond the border of a phase too."""
        tokens: list[int] = []
        while ahead := self._now.forced():
            if self._next is None:
                return self._back(tokens) + ahead
            begun = len(self._begun)
            tokens += [token for token in ahead if self.advance(token)]
            if len(self._begun) == begun:
                break
        return self._back(tokens)

    def _back(self, tokens: list[int]) -> list[int]:
        self.rollback(len(tokens))
        return tokens

    @property
    def _now(self) -> Phase:
        return self._begun[-1]

    @property
    def _next(self) -> int | None:
        following = self._at[-1] + 1
        return following if following < len(self._makers) else self._again

    def _begin_next(self) -> None:
        while self._now.finished and not self._now.failure and (following := self._next) is not None:
            self._begun.append(self._makers[following]())
            self._taken.append(0)
            self._at.append(following)


def _ids(size: int, ids: Sequence[int] | frozenset[int]) -> Allowed:
    """A mask of these alone; ends of text may be ids that the tokenizer does not have."""
    mask = np.zeros(size, np.bool_)
    mask[[token for token in ids if token < size]] = True
    return mask
