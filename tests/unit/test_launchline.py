"""Any launch line, as pasted, is taken apart into engine, flags and environment."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bringup.errors import UsageError
from bringup.launchline import TEXT_LIMIT, parse


def test_continuation_lines_are_one_command() -> None:
    line = parse("python -m sglang.launch_server \\\n  --model-path /m \\\n  --tp 8\n")
    assert (line.engine, line.model, line.argv) == ("sglang", "/m", ("--model-path", "/m", "--tp", "8"))
    assert line.complete


def test_a_comment_after_a_backslash_does_not_end_the_command() -> None:
    line = parse("vllm serve /m \\ # the model\n --port 8000 \\ # see --help\n --host ::1 # here")
    assert line.argv == ("--port", "8000", "--host", "::1")


def test_a_line_whose_breaks_a_page_has_lost_is_still_read() -> None:
    line = parse("vllm serve /m \\ --port 8000 \\ # open it --host 0.0.0.0")
    assert line.argv == ("--port", "8000", "--host", "0.0.0.0")


def test_environment_comes_from_export_env_and_the_line_itself() -> None:
    line = parse("export A=1\nB=2\nenv C=3 D='4 5' sglang serve /m --tp 8")
    assert dict(line.env) == {"A": "1", "B": "2", "C": "3", "D": "4 5"}
    assert line.model == "/m"


def test_variables_set_in_the_text_are_expanded_and_others_stay() -> None:
    line = parse("TP=8\nsglang serve $MODEL --tp ${TP} --port ${PORT:-30000} --json '$TP' --x \"$TP\"")
    assert line.model == "$MODEL"
    assert line.argv == ("--tp", "8", "--port", "30000", "--json", "$TP", "--x", "8")


def test_json_and_nasty_values_survive_quoting() -> None:
    line = parse(
        """vllm serve '/a dir/"m"' --speculative-config '{"method": "mtp"}' --alias "100% \\$HOME é" """
    )
    assert line.model == '/a dir/"m"'
    assert line.argv == ("--speculative-config", '{"method": "mtp"}', "--alias", "100% $HOME é")


@pytest.mark.parametrize(
    ("prefix", "wrappers"),
    [
        ("nohup ", ("nohup",)),
        ("numactl --cpunodebind=1 --membind=1 ", ("numactl", "--cpunodebind=1", "--membind=1")),
        ("sudo -E taskset -c 0-71 ", ("sudo", "-E", "taskset", "-c", "0-71")),
    ],
)
def test_what_wraps_the_engine_is_told_from_its_flags(prefix: str, wrappers: tuple[str, ...]) -> None:
    line = parse(prefix + "vllm serve /m --port 1")
    assert line.wrappers == wrappers
    assert line.argv == ("--port", "1")


@pytest.mark.parametrize(
    "tail", ["> /tmp/log 2>&1 &", "2>&1 | tee /tmp/log", "&>> log", "< /dev/null; echo done"]
)
def test_redirections_and_pipes_are_no_flags(tail: str) -> None:
    assert parse(f"sglang serve /m --tp 8 {tail}").argv == ("--tp", "8")


def test_a_shell_inside_a_shell_is_opened() -> None:
    text = (
        """tmux new-session -d 'bash -c ". /c.sh && A=1 python3 -m sglang.launch_server --model-path /m"'"""
    )
    line = parse(text)
    assert (line.engine, line.argv, dict(line.env)) == ("sglang", ("--model-path", "/m"), {"A": "1"})


def test_a_container_that_is_the_engine_takes_flags_at_once() -> None:
    line = parse(
        "docker run --gpus all --rm -it -e VLLM_API_KEY=k --env HF=1 -v /m:/m -p 8000:8000 "
        "vllm/vllm-openai:v0.23.0 --model /m -tp 8"
    )
    assert (line.engine, line.version, line.model) == ("vllm", "0.23.0", "/m")
    assert line.argv == ("--model", "/m", "-tp", "8")
    assert dict(line.env) == {"VLLM_API_KEY": "k", "HF": "1"}


def test_a_container_with_a_command_is_read_through() -> None:
    line = parse("A=1 docker run lmsysorg/sglang:v0.5.10.post1-cu129 python3 -m sglang.launch_server --tp 8")
    assert (line.engine, line.version, line.argv) == ("sglang", "0.5.10.post1", ("--tp", "8"))
    assert dict(line.env) == {}


def test_a_unit_file_line_is_read() -> None:
    line = parse("ExecStart=/opt/env/bin/python -m sglang.launch_server --model-path /m")
    assert (line.engine, line.program[0]) == ("sglang", "/opt/env/bin/python")


def test_flags_alone_are_a_list_and_no_whole_launch() -> None:
    line = parse("--attention-backend nsa \\\n--model-path /m")
    assert (line.engine, line.complete, line.model) == (None, False, "/m")


def test_flags_on_lines_of_their_own_are_one_list() -> None:
    assert parse("--a 1\n--b 2").argv == ("--a", "1", "--b", "2")


def test_words_that_a_shell_has_split_are_taken_as_they_are() -> None:
    line = parse(["vllm", "serve", "/m", "--alias", "$HOME 'x'"])
    assert (line.engine, line.model, line.argv) == ("vllm", "/m", ("--alias", "$HOME 'x'"))


def test_one_word_may_hold_the_whole_line() -> None:
    assert parse(["vllm serve /m --port 1"]).argv == ("--port", "1")


def test_typographic_quotes_are_read_and_remembered() -> None:
    line = parse("vllm serve /m --api-key “a b”")
    assert line.argv == ("--api-key", "a b")
    assert line.curly


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no engine and no flags"),
        ("ls -l /tmp", "no engine and no flags"),
        ("sglang serve 'x", "never closed"),
        ('vllm serve "x', "never closed"),
        ("vllm serve $(cat", "never closed"),
        ("x" * (TEXT_LIMIT + 1), "longer than"),
    ],
)
def test_text_that_cannot_be_read_says_why(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(text)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab1- =\\'\"$(){}#|&;<>\n“”é", max_size=60))
def test_no_text_ends_in_anything_but_a_launch_or_a_usage_error(text: str) -> None:
    try:
        line = parse("sglang serve /m --tp 8 " + text)
    except UsageError:
        return
    assert line.engine == "sglang"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=12), max_size=6))
def test_split_words_come_back_unchanged(words: list[str]) -> None:
    line = parse(["vllm", "serve", "/m", *words])
    assert line.argv == tuple(words)
