"""Prompt lookup: what is guessed, and how long a guess is."""

from isthmus.engine.speculate import MAX_DRAFT, PromptLookup


def test_it_guesses_what_followed_the_last_time() -> None:
    assert PromptLookup().propose([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == [4, 5, 6, 9]


def test_the_longer_match_wins_and_of_equals_the_later_one() -> None:
    assert PromptLookup().propose([1, 2, 3, 70, 5, 2, 3, 80, 5, 1, 2, 3])[0] == 70
    assert PromptLookup().propose([2, 3, 70, 5, 2, 3, 80, 5, 2, 3])[0] == 80


def test_nothing_is_guessed_without_a_match_or_from_one_token() -> None:
    lookup = PromptLookup()
    assert lookup.propose([1]) == []
    assert lookup.propose([1, 2, 3, 1]) == []
    assert lookup.propose([1, 2, 3, 1, 2]) == [3, 1, 2]  # told token by token, it sees as much


def test_a_loop_is_guessed_as_far_as_it_was_seen() -> None:
    assert PromptLookup().propose([5, 5, 5, 5]) == [5]


def test_a_guess_grows_where_guesses_are_right_and_shrinks_where_they_are_wrong() -> None:
    tokens = [*range(50), 0, 1, 2]
    lookup = PromptLookup()
    lengths = []
    for accepted in (True, True, True, False, False):
        draft = lookup.propose(tokens)
        lengths.append(len(draft))
        lookup.learn(len(draft), len(draft) if accepted else 0)
    assert lengths == [4, 8, 16, 16, 8]
    assert len(lookup.propose(tokens)) == 4 <= MAX_DRAFT
