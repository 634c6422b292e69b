"""Profiles as files: read as written, and what is no profile."""

from pathlib import Path

import pytest

from isthmus.errors import UsageError
from isthmus.placement.profile import Profile


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    profile = Profile("m", 100, {0: (1, 2, 3), 7: (0, 9, 0)})
    (tmp_path / "p.json").write_text(profile.to_json())
    assert Profile.read(tmp_path / "p.json") == profile


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no JSON"),
        ("[]", "is an object of model, tokens and counts"),
        ('{"model": "m", "tokens": 1}', "is an object of model, tokens and counts"),
        ('{"model": "m", "tokens": -1, "counts": {}}', "tokens a number"),
        ('{"model": "m", "tokens": 1, "counts": []}', "counts must be an object of layers"),
        ('{"model": "m", "tokens": 1, "counts": {"x": [1]}}', "counts has the key 'x'"),
        (
            '{"model": "m", "tokens": 1, "counts": {"3": [1, -1]}}',
            "counts of layer 3 must be a list of numbers",
        ),
        ('{"model": "m", "tokens": 1, "counts": {"3": [true]}}', "counts of layer 3"),
    ],
)
def test_what_is_no_profile_is_an_error(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Profile.from_json(text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"p\.json: the profile cannot be read"):
        Profile.read(tmp_path / "p.json")
