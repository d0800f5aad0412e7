"""What no rule knows is named by its words, with the words said, or not named at all."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bringup import diagnose, failures, nearest

WORDINGS = [
    nearest.Wording("flux", "the flux capacitor could not be charged"),
    nearest.Wording("flux", "flux capacitor: charging failed, no plutonium"),
    nearest.Wording("warp", "warp core breach: containment field lost"),
    nearest.Wording("warp", "containment of the warp core is failing"),
    nearest.Wording(nearest.NONE, "replicator: tea is cold, error ignored"),
    nearest.Wording(nearest.NONE, "replicator warning: cold tea, no error"),
]


def _index() -> nearest.Index:
    return nearest.Index(WORDINGS)


def test_the_nearest_cause_comes_first_and_says_which_words_led_there() -> None:
    first = _index().guesses("error 17: capacitor of the flux drive is not charging")[0]
    assert first.cause == "flux"
    assert "capacitor" in first.words
    assert "drive" not in first.words
    assert first.lead >= nearest.SURE


def test_a_word_in_another_form_is_near_too() -> None:
    assert _index().guesses("cores of warp lost their containments")[0].cause == "warp"


def test_what_is_nearest_to_harmless_wordings_has_no_cause() -> None:
    assert _index().guesses("replicator error: my tea is cold") == []


@pytest.mark.parametrize("text", ["", "17 0x1f 2026-11-29", "zzz qqq"])
def test_a_text_without_known_words_has_no_cause(text: str) -> None:
    assert _index().guesses(text) == []


def test_a_cause_is_named_with_the_line_that_is_worded_like_it() -> None:
    library = failures.library()
    text = "error: capacitor of the flux drive is not charging"
    causes = {"flux": library.causes["disk-full"], "warp": library.causes["dns-failure"]}
    lines = [diagnose.of_text(text).unusual]
    answer = nearest.ask(lines, _index(), causes)
    assert answer.guess is not None
    assert answer.guess.cause == "flux"
    assert answer.lines == lines[0]


def test_one_word_alone_names_no_cause() -> None:
    causes = failures.library().causes
    library = {"flux": causes["disk-full"], "warp": causes["dns-failure"]}
    line = diagnose.of_text("error: capacitor").unusual
    answer = nearest.ask([line], _index(), library)
    assert answer.guess is None
    assert [guess.cause for guess in answer.perhaps] == ["flux"]


def test_a_look_alike_of_a_cause_is_not_named_by_words() -> None:
    data = failures.library().causes["disk-full"].model_dump()
    entry = failures.Failure.model_validate({**data, "benign": ["flux drive"]})
    causes = {"flux": entry, "warp": failures.library().causes["dns-failure"]}
    line = diagnose.of_text("error: capacitor of the flux drive is not charging").unusual
    assert nearest.ask([line], _index(), causes) == nearest.Answer()


def test_perhaps_is_no_finding() -> None:
    found = diagnose.Diagnosis((), perhaps=(nearest.Guess("disk-full", 0.2, 0.1, ("disk",)),))
    assert int(found.exit) == 0
    assert found.as_json()["findings"] == []
    assert found.as_json()["perhaps"][0]["words"] == ("disk",)
    console = Console(file=io.StringIO(), width=200, no_color=True)
    diagnose.show(found, console)
    assert "Perhaps, by the words alone" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_text_without_trouble_reads_no_wordings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "index", lambda: pytest.fail("the wordings were read"))
    assert diagnose.of_text("INFO all is well\nINFO still well").perhaps == ()


def test_a_finding_by_words_is_shown_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = nearest.Answer(nearest.Guess("disk-full", 0.8, 0.6, ("flux", "capacitor")))
    monkeypatch.setattr(nearest, "ask", lambda *_: answer)
    found = diagnose.of_text("FATAL the flux capacitor exploded")
    assert found.first is not None
    assert (found.first.cause, found.first.confidence) == ("disk-full", 0.55)
    console = Console(file=io.StringIO(), width=200, no_color=True)
    diagnose.show(found, console)
    assert "flux, capacitor" in console.file.getvalue()  # type: ignore[attr-defined]
