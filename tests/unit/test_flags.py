"""A command line is judged as the engine's parser would, and then by what the engine does with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bringup import flags
from bringup.errors import UsageError
from bringup.flagparse import parse
from bringup.flags import Finding, FlagContext, ModelFacts
from bringup.flagtable import EnvVar, Flag, FlagTable

HOPPER = FlagContext(sm=90, model=ModelFacts(sparse_attention=True))

TABLE = FlagTable(
    engine="tiny",
    version="1.0",
    source="made here",
    flags=(
        Flag(names=("--model-path", "--model"), dest="model_path", required=True),
        Flag(names=("--tp-size", "--tensor-parallel-size"), dest="tp_size", kind="int", default=1),
        Flag(names=("--token-limit",), dest="token_limit", kind="human_int"),
        Flag(names=("--dtype",), dest="dtype", choices=("auto", "half"), default="auto"),
        Flag(names=("--level", "-O"), dest="level", kind="int", choices=(0, 1, 2)),
        Flag(names=("--metrics",), dest="metrics", kind="bool", nargs=0, negatives=("--no-metrics",)),
        Flag(names=("--nodes",), dest="nodes", kind="int", nargs="+"),
        Flag(names=("--tag",), dest="tag", repeat=True),
        Flag(names=("--spec",), dest="spec", kind="json", keys=("method", "tokens")),
        Flag(names=("--api-key",), dest="api_key"),
        Flag(names=("--old",), dest="old", deprecated=True, use="--new"),
        Flag(names=("--gone",), dest="gone", kind="bool", nargs=0, deprecated=True, refused="use --new"),
    ),
    env=(
        EnvVar("TINY_FAST", "bool"),
        EnvVar("TINY_WAIT_S", "int"),
        EnvVar("TINY_OLD", "str", None, True, "use TINY_NEW"),
    ),
    underscores=True,
    dotted=True,
    env_prefixes=("TINY_",),
)


def judged(*words: str, env: Mapping[str, str] | None = None, complete: bool = False) -> list[Finding]:
    return flags.check(TABLE, words, env or {}, FlagContext(complete=complete))


def codes(*words: str, env: Mapping[str, str] | None = None) -> list[str]:
    return [finding.code for finding in judged(*words, env=env)]


@pytest.mark.parametrize(
    "words",
    [
        ("--tp-size", "8"),
        ("--tp-size=8",),
        ("--tp_size", "8"),
        ("--tp_size=8",),
        ("--metrics",),
        ("--no-metrics",),
        ("--nodes", "0", "1"),
        ("--nodes", "-1", "--metrics"),
        ("--tag", "a", "--tag", "b"),
        ("--dtype", "half"),
        ("-O2",),
        ("-O", "2"),
        ("-O=2",),
        ("--token-limit", "8k"),
        ("--spec", '{"method": "mtp"}'),
        ("--spec.method", "mtp"),
        ("--spec.method=mtp", "--spec.tokens", "3"),
        ("--model", "-a b"),
        ("--model", "100% $HOME é\n"),
        (),
    ],
)
def test_what_the_parser_takes_has_no_finding(words: tuple[str, ...]) -> None:
    assert codes(*words) == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--tp-size", "eight"), "FLAG_TYPE", "whole number"),
        (("--tp-size", "8.0"), "FLAG_TYPE", "whole number"),
        (("--tp-size",), "FLAG_VALUE", "needs a value"),
        (("--tp-size", "--metrics"), "FLAG_VALUE", "needs a value"),
        (("--tp-size", "8", "9"), "FLAG_STRAY", '"9"'),
        (("stray",), "FLAG_STRAY", "stray"),
        (("--metrics", "true"), "FLAG_STRAY", '"true"'),
        (("--metrics=true",), "FLAG_VALUE", "takes no value"),
        (("--nodes",), "FLAG_VALUE", "needs a value"),
        (("--nodes", "0", "one"), "FLAG_TYPE", '"one"'),
        (("--dtype", "float8"), "FLAG_CHOICE", "auto, half"),
        (("--level", "3"), "FLAG_CHOICE", "0, 1, 2"),
        (("--token-limit", "8.5K"), "FLAG_TYPE", "8k"),
        (("--spec", "{method: mtp}"), "FLAG_TYPE", "JSON"),
        (("--spec", '{"methd": "mtp"}'), "FLAG_VALUE", 'no key "methd"'),
        (("--spec.methd", "mtp"), "FLAG_VALUE", 'no key "methd"'),
        (("--to", "1"), "FLAG_PREFIX", "--token-limit"),
        (("--t", "1"), "FLAG_AMBIGUOUS", "--tag, --tensor-parallel-size, --token-limit, --tp-size"),
        (("--tp-sise", "1"), "FLAG_UNKNOWN", "no such flag"),
        (("-x", "1"), "FLAG_UNKNOWN", "no such flag"),
        (("--tp-size", "2", "--tensor-parallel-size", "4"), "FLAG_REPEATED", '"2" loses to "4"'),
        (("--metrics", "--no-metrics"), "FLAG_REPEATED", "loses"),
        (("--tp-size", "2", "--tp-size", "2"), "FLAG_REPEATED", "same value"),
        (("--old", "x"), "FLAG_DEPRECATED", "deprecated"),
        (("--gone",), "FLAG_REMOVED", "refused"),
    ],
)
def test_what_it_does_not_take_is_named(words: tuple[str, ...], code: str, said: str) -> None:
    found = judged(*words)
    assert [finding.code for finding in found] == [code]
    assert said in found[0].what


def test_an_unknown_flag_gets_a_suggestion() -> None:
    assert "--tp-size" in judged("--tp-sise", "1")[0].instead


def test_a_whole_launch_misses_its_required_flag_and_a_list_of_flags_does_not() -> None:
    assert [finding.code for finding in judged(complete=True)] == ["FLAG_REQUIRED"]
    assert judged(complete=False) == []


def test_a_key_is_never_repeated_in_a_message() -> None:
    for finding in judged("--api-key", "hunter-two", "--api-key", "hunter-three"):
        assert "hunter" not in repr(finding)


def test_after_two_dashes_everything_is_a_word() -> None:
    assert [finding.code for finding in judged("--", "--tp-size")] == ["FLAG_STRAY"]


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"TINY_FAST": "1"}, None),
        ({"TINY_FAST": "True"}, None),
        ({"TINY_FAST": "maybe"}, "ENV_TYPE"),
        ({"TINY_WAIT_S": "ten"}, "ENV_TYPE"),
        ({"TINY_WAIT": "10"}, "ENV_UNKNOWN"),
        ({"TINY_OLD": "1"}, "ENV_DEPRECATED"),
        ({"VLLM_LOGGING_LEVEL": "DEBUG"}, "ENV_OTHER_ENGINE"),
        ({"LD_PRELOAD": "/l.so", "CUDA_VISIBLE_DEVICES": "0"}, None),
    ],
)
def test_the_environment_is_checked_too(env: dict[str, str], code: str | None) -> None:
    assert codes(env=env) == ([code] if code else [])


def test_a_shell_variable_is_not_judged_in_a_pasted_line_and_is_in_an_argument_list() -> None:
    pasted = flags.check(TABLE, ["--tp-size", "$TP"], {}, FlagContext(complete=False, shell=True))
    assert [finding.code for finding in pasted] == ["LINE_VARIABLE"]
    assert codes("--tp-size", "$TP") == ["FLAG_TYPE"]


def test_a_flag_of_another_version_is_told_from_one_that_never_was() -> None:
    new = flags.check(flags.load_table("sglang", "0.5.23"), ["--nsa-prefill-backend", "fa3"], {}, HOPPER)
    old = flags.check(flags.load_table("sglang", "0.5.10.post1"), ["--attn-dp-size", "8"], {}, HOPPER)
    never = flags.check(flags.load_table("sglang", "0.5.23"), ["--enable-turbo-mode"], {}, HOPPER)
    assert "FLAG_RENAMED" in {finding.code for finding in new}
    assert "FLAG_TOO_NEW" in {finding.code for finding in old}
    assert "FLAG_UNKNOWN" in {finding.code for finding in never}


def test_a_removed_flag_without_a_rule_names_its_successor() -> None:
    table = flags.load_table("sglang", "0.5.23")
    found = flags.check(table, ["--cuda-graph-max-bs", "16"], {}, FlagContext(complete=False))
    removed = next(finding for finding in found if finding.flag == "--cuda-graph-max-bs")
    assert (removed.code, removed.instead) == ("FLAG_REMOVED", "use --cuda-graph-max-bs-decode")


def test_json_dotted_and_short_spellings_meet_the_same_rules() -> None:
    table = flags.load_table("vllm", "0.33.0")
    lines = (
        ["--speculative-config", '{"method": "deepseek_mtp"}'],
        ["--speculative-config.method", "deepseek_mtp"],
        ["--speculative_config.method=deepseek_mtp"],
    )
    for words in lines:
        found = {finding.code for finding in flags.check(table, words, {}, FlagContext(sm=90))}
        assert "FLAG_DEPRECATED" in found


def test_an_unknown_gpu_makes_a_refusal_conditional() -> None:
    table = flags.load_table("sglang", "0.5.23")
    words = ["--enable-single-batch-overlap"]
    unknown = flags.check(table, words, {}, FlagContext(complete=False))
    hopper = flags.check(table, words, {}, FlagContext(sm=90, complete=False))
    blackwell = flags.check(table, words, {}, FlagContext(sm=100, complete=False))
    assert [(f.severity, f.code) for f in unknown] == [("warning", "FLAG_REFUSED_GPU")]
    assert unknown[0].what.startswith("if the GPU is SM90: ")
    assert [(f.severity, f.code) for f in hopper] == [("error", "FLAG_REFUSED_GPU")]
    assert blackwell == []


def test_a_server_that_is_guarded_otherwise_is_not_called_open() -> None:
    table = flags.load_table("sglang", "0.5.23")
    words = ["--model-path", "/m", "--host", "0.0.0.0"]
    assert "FLAG_UNSAFE" in {finding.code for finding in flags.check(table, words, {}, FlagContext())}
    guarded = flags.check(table, words, {}, FlagContext(guarded=True))
    assert "FLAG_UNSAFE" not in {finding.code for finding in guarded}


def test_errors_come_first() -> None:
    table = flags.load_table("sglang", "0.5.23")
    words = ["--tp", "8", "--num-continuous-decode-steps", "4", "--fp8-gemm-backend", "cutlass"]
    ranks = [finding.severity for finding in flags.check(table, words, {}, HOPPER)]
    assert ranks == sorted(ranks, key=("error", "warning", "note").index)
    assert flags.worst(flags.check(table, words, {}, HOPPER)) == "error"
    assert flags.worst([]) is None


def test_a_missing_table_names_the_command_that_makes_it() -> None:
    with pytest.raises(UsageError, match=r"flags\.table --engine sglang --version 9\.9\.9"):
        flags.load_table("sglang", "9.9.9")
    with pytest.raises(UsageError, match='Did you mean "sglang"'):
        flags.load_table("sglnag", "0.5.23")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(sorted(TABLE.options)), st.text(max_size=8)), max_size=8))
def test_no_words_are_lost_and_nothing_fails(words: list[str]) -> None:
    parsed = parse(TABLE, words)
    parts = [part for item in parsed.given for part in (item.spelled, item.key, *item.words)] + list(
        parsed.strays
    )
    lost = Counter("".join(words)) - Counter("".join(parts))
    assert set(lost) <= set("-=.+")
    flags.check(TABLE, words, {}, FlagContext(shell=True))
