"""Failure files: what is refused, how a rule is added from a log, anchors of patterns."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from bringup import diagnose, entries, failures, logtext, multifind, yamlfile
from bringup.errors import UsageError

ANSWERS = {
    "title": "The flux capacitor is empty",
    "area": "hardware",
    "meaning": "No flux is left.",
    "check": "Look at the gauge.",
    "remedy": "Fill it.",
    "source": "https://example.org/flux",
}
LINE = "[2026-11-29 18:52:05 TP0] ERROR flux capacitor 7 at /srv/models/x is empty (100% $HOME), code 0x1f"


def test_a_rule_added_from_a_log_finds_the_line_and_its_variants(tmp_path: Path) -> None:
    path = failures.add("flux-empty", [LINE], ANSWERS, tmp_path)
    assert path.name == "flux-empty.yml"
    library = failures.compile_library(failures.load(tmp_path))
    pattern = library.causes["flux-empty"].match[0].patterns[0]
    assert re.search(pattern, LINE, re.IGNORECASE)
    assert re.search(
        pattern, "flux capacitor 12 at /other/place/y is empty (5% $HOME), code 0xff", re.IGNORECASE
    )
    assert not re.search(pattern, "flux capacitor is full", re.IGNORECASE)


def test_a_rule_is_added_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        failures.add("Bad Name", [], {"title": "x"}, tmp_path)
    assert len(caught.value.problems) == 7
    assert list(tmp_path.iterdir()) == []


def test_missing_answers_are_asked_for_and_given_ones_are_not() -> None:
    questions: list[str] = []

    def ask(question: str) -> str:
        questions.append(question)
        return " said "

    answers = failures.asked({"title": "x", "area": ""}, ask)
    assert answers["title"] == "x"
    assert answers["area"] == answers["source"] == "said"
    assert len(questions) == len(failures.QUESTIONS) - 1
    assert "hardware" in questions[0]


def test_a_rule_without_fixed_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no fixed text"):
        failures.add("numbers", ["12 34"], ANSWERS, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_subject_without_fixed_words_is_refused() -> None:
    with pytest.raises(ValueError, match="no fixed text"):
        failures.Clause.model_validate({"trouble": r"sm_?\d+"})


def test_a_pair_needs_two_usable_expressions() -> None:
    with pytest.raises(ValueError, match="two expressions"):
        failures.Clause.model_validate({"both": ["alpha"]})
    with pytest.raises(ValueError, match="no fixed text"):
        failures.Clause.model_validate({"both": [r"\d+", r"\w"]})


def test_an_existing_cause_is_not_overwritten(tmp_path: Path) -> None:
    failures.add("flux-empty", [LINE], ANSWERS, tmp_path)
    with pytest.raises(UsageError, match="exists"):
        failures.add("flux-empty", [LINE], ANSWERS, tmp_path)


def test_lines_that_a_rule_knows_already_are_refused_with_its_name(tmp_path: Path) -> None:
    failures.add("flux-empty", [LINE], ANSWERS, tmp_path)
    with pytest.raises(UsageError, match='already known as "flux-empty"'):
        failures.add("flux-again", [LINE.replace("7", "8")], ANSWERS, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["flux-empty.yml"]


def test_a_guess_does_not_keep_a_rule_for_its_line_out(tmp_path: Path) -> None:
    path = failures.add("flux-empty", [LINE], ANSWERS, tmp_path)
    entry = yamlfile.read_yaml(path, path.name)
    entry["match"] = [{"trouble": "flux capacitor", "confidence": 0.6}]
    failures._write(path, entry)
    failures.add("flux-lost", ["flux capacitor was lost"], ANSWERS, tmp_path)
    assert sorted(item.stem for item in tmp_path.iterdir()) == ["flux-empty", "flux-lost"]


def test_all_problems_of_all_files_come_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("title: x\nmatch: [{line: '('}]\n")
    (tmp_path / "b.yml").write_text("titel: x\n")
    with pytest.raises(UsageError) as caught:
        failures.load(tmp_path)
    text = str(caught.value)
    assert "a.yml" in text
    assert "b.yml" in text
    assert 'Did you mean "title"' in text


def test_a_cause_that_explains_nothing_known_is_refused(tmp_path: Path) -> None:
    path = failures.add("flux-empty", [LINE], ANSWERS, tmp_path)
    path.write_text(path.read_text() + "explains: [nothing-here]\n")
    with pytest.raises(UsageError, match='names "nothing-here"'):
        failures.load(tmp_path)


def _has_needs(pattern: str, line: str) -> bool:
    """Whether the line has all texts that one alternative of the pattern says it must have."""
    edge = logtext.EDGE.encode()
    lowered = line.encode().lower()
    return any(
        all(any(text.strip(edge) in lowered for text in texts) for texts in logtext.needs_of(alternative))
        for alternative in logtext.alternatives(pattern)
    )


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"No space left|disk quota", "DISK QUOTA exceeded"),
        (r"(?:out of|exhausted) memory", "Out of memory"),
        (r"\bxid 4[58]|xid 9\d", "Xid 94"),
        (r"foo(?:bar|baz)?qux", "fooqux"),
        (r"显存.{0,9}释放", "显存没有释放"),
        (r"a{2}lpha (?:beta)+", "aalpha betabeta"),
        (r"[|(]alpha\|beta", "|alpha|beta"),
        (r"(?:hug|hub|home)s and", "hubs and"),
    ],
)
def test_a_pattern_never_matches_a_line_without_what_it_needs(pattern: str, text: str) -> None:
    assert re.search(pattern, text, re.IGNORECASE | re.ASCII)
    assert _has_needs(pattern, text)


def test_every_pattern_finds_its_needs_in_the_samples_that_it_matches() -> None:
    lines = {
        line for failure in failures.load().values() for text in failure.samples for line in text.splitlines()
    }
    patterns = {
        pattern
        for failure in failures.load().values()
        for clause in failure.match
        for pattern in clause.patterns
    }
    matched = 0
    for pattern in patterns:
        regex = re.compile(pattern, re.IGNORECASE | re.ASCII)
        for line in lines:
            if regex.search(line):
                matched += 1
                assert _has_needs(pattern, line), (pattern, line)
    assert matched > 200


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("a|b", ["a", "b"]),
        ("(a|b)|c", ["(a|b)", "c"]),
        (r"a\|b|[|]|(?:x|(?:y|z))", [r"a\|b", "[|]", "(?:x|(?:y|z))"]),
        ("alone", ["alone"]),
    ],
)
def test_a_pattern_is_split_at_its_outer_bars_only(pattern: str, parts: list[str]) -> None:
    assert logtext.alternatives(pattern) == parts


@pytest.mark.parametrize(
    ("pattern", "anchor"),
    [
        (r"(?:error|status) .{0,9}(?:404|403)", b"error"),
        (r"too .{0,9}vram", b"vram"),
        (r"(?:g\+\+|compiler) .{0,40}(?:bad|error|dead)", b"compiler"),
    ],
)
def test_a_line_is_found_by_its_rarest_words_and_not_by_numbers(pattern: str, anchor: bytes) -> None:
    assert anchor in logtext.needs_of(pattern)[0]


TEXTS = (b"out of memory", b"\0xid", b"memory", b"(exit 0)", b"tokenizer", b"token", b"p2p", "显存".encode())


@pytest.mark.parametrize(
    ("chunk", "found"),
    [
        ("cuda out of memory now", [b"memory", b"out of memory"]),
        ("outof memory", [b"memory"]),
        ("nvrm: xid 79 and oxid", [b"xid"]),
        ("tokenizers", [b"token", b"tokenizer"]),
        ("betoken p2p", [b"p2p", b"token"]),
        ("显存 gpu", ["显存".encode()]),
        ("nothing of it", []),
        ("memory memory", [b"memory", b"memory"]),
    ],
)
def test_texts_are_found_wherever_they_are(chunk: str, found: list[bytes]) -> None:
    finder = multifind.Finder(TEXTS)
    for _ in range(2):  # the second time from memory
        hits = finder.find(chunk.encode())
        texts = {TEXTS[index].strip(b"\0") for _, index in hits}
        assert texts == set(found)
        assert hits == sorted(hits)


def test_random_texts_in_random_chunks_are_found_as_a_plain_search_finds_them() -> None:
    rng = random.Random(7)
    letters = "aab c."
    texts = tuple({"".join(rng.choices(letters, k=rng.randint(3, 6))).encode() for _ in range(80)})
    finder = multifind.Finder(texts)
    for _ in range(60):
        chunk = "".join(rng.choices(letters, k=200)).encode()
        plain = sorted(
            (start, index)
            for index, text in enumerate(texts)
            for start in range(len(chunk))
            if chunk.startswith(text, start)
        )
        assert finder.find(chunk) == plain


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("NVRM: Xid (PCI:0000:07:00): 48, pid=1", True),
        ("XID 48(double bit) detected", True),
        ("`Xid 48 / 171`", True),
        ('DCGM_FI_DEV_XID_ERRORS{gpu="0"} 48', True),
        ("Xid (PCI:0000:48:00): 45, pid=1", False),
        ("Xid 480", False),
    ],
)
def test_gpu_error_codes_are_read_in_every_notation(text: str, found: bool) -> None:
    assert bool(re.search(failures.xid_pattern([48]), text, re.IGNORECASE)) is found


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[rank3]: RuntimeError", "3"),
        ("[2025-08-02 19:24:30 TP3] Watchdog", "TP3"),
        ("[2025-12-26 08:58:37 DP0 TP0 EP0] x", "DP0 TP0 EP0"),
        ("(Worker_TP7_EP7 pid=21) ERROR", "TP7_EP7"),
        ("node1:27907:27907 [1] NCCL WARN", "1"),
        ("plain", None),
    ],
)
def test_the_rank_of_a_line_is_known(line: str, rank: str | None) -> None:
    assert logtext.rank_of(line) == rank


def test_versions_with_suffixes_are_compared_and_unknown_ones_pass() -> None:
    assert failures.in_range("0.5.15.post1", ">=0.5.13,<0.6")
    assert not failures.in_range("0.5.11", ">=0.5.13")
    assert failures.in_range("main", ">=0.5.13")


def test_the_library_is_reread_only_when_a_file_changes(tmp_path: Path) -> None:
    failures.add("flux-empty", [LINE], ANSWERS, tmp_path)
    first = failures.library(tmp_path)
    assert failures.library(tmp_path) is first
    failures.add("flux-full", ["flux capacitor overflowed"], ANSWERS, tmp_path)
    assert set(failures.library(tmp_path).causes) == {"flux-empty", "flux-full"}


def test_an_unknown_area_is_refused() -> None:
    with pytest.raises(UsageError, match="area"):
        entries.build(failures.Failure, {"area": "moon"}, "x.yml")


def test_the_shipped_rules_diagnose_offline_and_quickly() -> None:
    assert diagnose.of_text("nothing at all").findings == ()
