"""Drafts from known text: only what really stands there, the same however the answer was cut into steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from backend.drafters.prediction import PredictionState

LENGTHS = (4, 3, 2)
# Few distinct ids, so that texts repeat themselves and each other.
ids = st.integers(0, 3)
texts = st.lists(ids, max_size=24)


def tokens(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def letters(found: list[int]) -> str:
    return "".join(map(chr, found))


def state(prompt: str, prediction: str, answer: str) -> PredictionState:
    made = PredictionState(tokens(prompt), tokens(prediction))
    made.extend(tokens(answer))
    return made


def followers(text: list[int], last: list[int]) -> list[int]:
    """Indices of what follows each occurrence of `last` in `text`, found by looking everywhere."""
    n = len(last)
    return [end for end in range(n, len(text)) if text[end - n : end] == last]


class Recomputed:
    """The rules of the docstring applied to the whole text at once, without any index."""

    def __init__(self, prompt: list[int], prediction: list[int], answer: list[int]) -> None:
        self.text, self.prediction = prompt + answer, prediction
        at, reached, met = (0 if prediction else None), 0, set()
        for written, token in enumerate(answer, start=1):
            if at is not None and at < len(prediction) and prediction[at] == token:
                met.add(at)
                at = reached = at + 1
            else:
                at = next(
                    (
                        self._place(answer[written - n : written], reached)
                        for n in LENGTHS
                        if self._known(answer, written, n)
                    ),
                    None,
                )
        self.at = at if at is not None and at < len(prediction) else None
        self.met = met

    def _known(self, answer: list[int], written: int, n: int) -> bool:
        return n <= written and bool(followers(self.prediction, answer[written - n : written]))

    def _place(self, last: list[int], reached: int) -> int:
        places = followers(self.prediction, last)
        return min((p for p in places if p > reached), default=max(places))

    def propose(self, count: int) -> list[int]:
        if self.at is not None:
            return self.prediction[self.at : self.at + count]
        for n in LENGTHS:
            if n < len(self.text) and (found := followers(self.text, self.text[-n:])):
                grown = list(self.text)
                for i in range(count):
                    grown.append(grown[found[-1] + i])
                return grown[len(self.text) :]
        return []


class Answering(RuleBasedStateMachine):
    """An answer that now follows what was proposed, now goes its own way, in steps of any size."""

    @initialize(prompt=texts, prediction=texts)
    def begin(self, prompt: list[int], prediction: list[int]) -> None:
        self.prompt, self.prediction = prompt, prediction
        self.answer: list[int] = []
        self.state = PredictionState(prompt, prediction)

    def commit(self, step: list[int]) -> None:
        self.state.extend(step)
        self.answer += step

    @rule(step=st.lists(ids, max_size=5))
    def go_its_own_way(self, step: list[int]) -> None:
        self.commit(step)

    @rule(drafted=st.integers(1, 8), accepted=st.integers(0, 8), bonus=ids)
    def accept_some_of_a_proposal(self, drafted: int, accepted: int, bonus: int) -> None:
        self.commit([*self.state.propose(drafted)[:accepted], bonus])

    @rule(start=st.integers(0, 24), length=st.integers(1, 8))
    def quote_the_prediction(self, start: int, length: int) -> None:
        self.commit(self.prediction[start : start + length])

    @invariant()
    def it_proposes_what_recomputing_everything_gives(self) -> None:
        wanted = Recomputed(self.prompt, self.prediction, self.answer)
        for count in (1, 3, 8):
            assert self.state.propose(count) == wanted.propose(count)
        assert self.state.accepted == len(wanted.met)

    @invariant()
    def a_proposal_really_continues_its_source(self) -> None:
        draft = self.state.propose(8)
        text = self.prompt + self.answer
        match self.state.source:
            case "prediction":
                assert 1 <= len(draft) <= 8
                ends = [at for at in range(len(self.prediction)) if self.prediction[at : at + len(draft)] == draft]
                assert ends
                assert len(draft) == 8 or ends[-1] + len(draft) == len(self.prediction)
            case "ngrams":
                continued = text + draft
                assert any(continued[at : at + 8] == draft for at in followers(text, text[-2:]))
            case None:
                assert draft == []

    @invariant()
    def every_token_of_the_prediction_is_either_accepted_or_rejected(self) -> None:
        assert self.state.accepted + self.state.rejected == len(self.prediction)
        assert 0 <= self.state.accepted <= len(self.answer)

    @invariant()
    def the_size_of_the_steps_changes_nothing(self) -> None:
        at_once = PredictionState(self.prompt, self.prediction)
        at_once.extend(self.answer)
        assert at_once.propose(6) == self.state.propose(6)
        assert (at_once.accepted, at_once.source) == (self.state.accepted, self.state.source)


TestAnswering = Answering.TestCase
TestAnswering.settings = settings(max_examples=150, stateful_step_count=15, deadline=None)


def test_the_prediction_is_proposed_from_its_start() -> None:
    made = state("rename it", "class User", "")
    assert letters(made.propose(5)) == "class"
    assert made.source == "prediction"


def test_a_prediction_is_preferred_to_ngrams() -> None:
    made = state("abcX abcX", "abcY", "abc")
    assert letters(made.propose(1)) == "Y"


def test_the_last_proposal_of_a_prediction_is_as_long_as_what_is_left() -> None:
    assert letters(state("", "abcdef", "abcd").propose(8)) == "ef"


def test_after_a_substitution_the_prediction_is_taken_up_behind_it() -> None:
    made = state("", "name: str = 1; nick: str = 2;", "name: int = ")
    assert made.source == "prediction"
    assert letters(made.propose(3)) == "1; "


def test_after_an_insertion_the_prediction_goes_on_where_it_was_left() -> None:
    assert letters(state("", "one two three", "one and a half two").propose(6)) == " three"


def test_after_a_deletion_the_prediction_goes_on_behind_the_gap() -> None:
    assert letters(state("", "one two three four", "one three").propose(5)) == " four"


def test_of_several_places_the_first_after_the_last_followed_token_is_taken() -> None:
    made = state("", "xyA1 xyB2 xyC3", "xyA1 xyB2 ?xy")
    assert letters(made.propose(2)) == "C3"


def test_a_place_before_the_last_followed_token_serves_where_none_is_after_it() -> None:
    assert letters(state("", "head: tail", "head: tail! head").propose(3)) == ": t"


def test_a_longer_match_is_preferred_to_a_nearer_one() -> None:
    made = state("", "....cd1 abcd2", "?abcd")
    assert letters(made.propose(1)) == "2"


def test_one_equal_token_is_no_reason_to_take_the_prediction_up_again() -> None:
    made = state("", "abcdef", "Xc")
    assert made.source is None
    assert made.propose(4) == []


def test_without_a_prediction_the_most_recent_repetition_is_continued() -> None:
    made = state("foo(1); foo(2); bar", "", "; foo(")
    assert made.source == "ngrams"
    assert letters(made.propose(3)) == "2); "[:3]


def test_a_repetition_that_spans_prompt_and_answer_is_found() -> None:
    assert letters(state("say hello world. h", "", "el").propose(8)) == "lo world"


def test_a_longer_repetition_is_preferred_to_a_more_recent_one() -> None:
    assert letters(state("abcd1 cd2 abcd", "", "").propose(1)) == "1"


def test_what_stands_more_than_four_tokens_back_does_not_count() -> None:
    assert letters(state("abcd1 Xbcd2 Xbcd3 abcd", "", "").propose(1)) == "1"
    assert letters(state("abcde1 Xbcde2 abcde", "", "").propose(1)) == "2"


def test_a_loop_is_continued_for_as_long_as_asked() -> None:
    assert letters(state("", "", "ababab").propose(7)) == "abababa"
    assert letters(state("", "", "zzz").propose(4)) == "zzzz"


def test_text_that_never_repeats_gives_no_proposal() -> None:
    made = state("abc", "", "def")
    assert made.propose(4) == []
    assert made.source is None


@pytest.mark.parametrize("prompt", ["", "a", "ab"])
def test_short_texts_give_no_proposal(prompt: str) -> None:
    assert state(prompt, "", "").propose(4) == []


def test_a_used_up_prediction_leaves_the_rest_to_ngrams() -> None:
    made = state("abcabd", "xyz", "xyzab")
    assert made.source == "ngrams"
    assert letters(made.propose(1)) == "d"


def test_usage_counts_what_the_answer_took_from_the_prediction_and_what_it_left() -> None:
    made = state("", "user name = 1", "user mail = 1")
    # Followed: "user ", then, after "l =" and " =" were met again, " 1".
    assert (made.accepted, made.rejected) == (5 + 2, 13 - 7)


def test_a_token_of_the_prediction_that_is_written_twice_counts_once() -> None:
    made = state("", "abcd", "abcdabcdabcd")
    assert (made.accepted, made.rejected) == (4, 0)


def test_an_unused_prediction_is_rejected_whole() -> None:
    made = state("", "abcd", "wxyz")
    assert (made.accepted, made.rejected) == (0, 4)


def test_without_a_prediction_nothing_is_accepted_and_nothing_rejected() -> None:
    made = state("abab", "", "abab")
    assert (made.accepted, made.rejected) == (0, 0)


@settings(max_examples=200, deadline=None)
@given(st.lists(ids, min_size=1, max_size=60), st.integers(0, 8))
def test_an_answer_equal_to_its_prediction_is_proposed_whole(prediction: list[int], drafted: int) -> None:
    made = PredictionState([9, 9], prediction)
    answer: list[int] = []
    while len(answer) < len(prediction):
        draft = made.propose(drafted) if drafted else []
        assert draft == prediction[len(answer) : len(answer) + drafted]
        step = prediction[len(answer) : len(answer) + len(draft) + 1]
        made.extend(step)
        answer += step
    assert (made.accepted, made.rejected) == (len(prediction), 0)
