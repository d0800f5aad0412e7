"""Flags are read out of source that is never imported, and tables are written whole or not at all."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from bringup import flagtable
from bringup.errors import UsageError
from bringup.flagtable import FlagTable

CALLS = {
    "sglang/srt/server_args.py": """
import argparse, dataclasses
from typing import Optional
from sglang.srt.choices import BACKENDS, more
from sglang.srt.parser.reasoning_parser import ReasoningParser
raise RuntimeError("imported")
EXTRA = [*BACKENDS, "c"]
@dataclasses.dataclass
class ServerArgs:
    model_path: str
    tp_size: int = 1
    backend: Optional[str] = None
    @staticmethod
    def add_cli_args(parser):
        names = list(ReasoningParser.DetectorMap.keys())
        parser.add_argument("--model-path", "--model", type=str, required=True, help="the\\n  weights")
        parser.add_argument("--tensor-parallel-size", "--tp-size", type=int, default=ServerArgs.tp_size)
        parser.add_argument("--backend", choices=EXTRA, default=ServerArgs.backend)
        parser.add_argument("--more", choices=more())
        parser.add_argument("--graph", action=argparse.BooleanOptionalAction, default=True)
        parser.add_argument("--fast", action="store_true")
        parser.add_argument("--nodes", type=int, nargs="+")
        parser.add_argument("--extra", type=json.loads)
        parser.add_argument("--old", action=DeprecatedStoreTrueAction, new_flag="--fast", dest="fast")
        parser.add_argument("--gone", action=DeprecatedAction, error_message="use --fast")
        parser.add_argument("--reasoning-parser", choices=names)
""",
    "sglang/srt/choices.py": """
BACKENDS = ["a", "b"]
def more():
    return ["x", BACKENDS[0]] if False else ["x", "y"]
""",
    "sglang/srt/parser/reasoning_parser.py": """
class ReasoningParser:
    DetectorMap = {"glm45": 1, "qwen3": 2}
""",
    "sglang/srt/environ.py": """
class Envs:
    SGLANG_FAST = EnvBool(True)
    SGLANG_WAIT_S = EnvInt(3)
    SGLANG_NEW = EnvBoolWithAlias(False, deprecated_name="SGLANG_FORMER")
_DEPRECATED_ENVS = {"SGLANG_OLD": _DeprecatedEnv(note="it is always on")}
""",
    "sglang/srt/elsewhere.py": 'import os\nx = os.getenv("SGLANG_UNDECLARED")\n',
    "sglang-1.2.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 1.2.3\n",
}
FIELDS = {
    "sglang/srt/server_args.py": """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        add_cli_args_from_dataclass(parser, ServerArgs)
""",
    "sglang/srt/arg_groups/fields/model.py": """
from sglang.srt.arg_groups.choices import FORMATS
class Model(msgspec.Struct):
    model_path: A[str, Arg(help="Weights.", aliases=["--model"])]
    load_format: A[str, Arg(help="Format.", choices=FORMATS)] = "auto"
    fp8_runner: A[str, Arg(help="x", cli_name="--fp8-backend")] = "auto"
    mode: A[Literal["ar", "rs"], "Which."] = "ar"
    ports: A[Optional[list[int]], "Ports."] = None
    fast: A[bool, "Faster."] = False
    limit: A[Optional[int], Arg(help="x", type_parser=human_readable_int)] = None
    hidden: A[bool, Arg(no_cli=True)] = False
    plain: int = 3
    graph: A[bool, Arg(help="x", action=argparse.BooleanOptionalAction)] = True
""",
    "sglang/srt/arg_groups/choices.py": 'FORMATS = ["auto", "dummy"]\n',
    "sglang-2.0.0.dist-info/METADATA": "Version: 2.0.0\n",
}
VLLM = {
    "vllm/engine/arg_utils.py": """
from vllm.config import CacheConfig
class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        cache_kwargs = get_kwargs(CacheConfig)
        group.add_argument("--block-size", **cache_kwargs["block_size"])
        group.add_argument("--kv-cache-dtype", **cache_kwargs["cache_dtype"])
        group.add_argument("--max-model-len", **cache_kwargs["max_model_len"])
        group.add_argument("--enable-caching", **{**cache_kwargs["caching"], "default": None})
        group.add_argument("--names", **cache_kwargs["names"])
        group.add_argument("--transfer", **cache_kwargs["transfer"])
        group.add_argument("--either", **cache_kwargs["either"])
        cache_kwargs["names_of"]["type"] = json.loads
        group.add_argument("--names-of", "-n", **cache_kwargs["names_of"])
class AsyncEngineArgs:
    pass
""",
    "vllm/config/__init__.py": "from .cache import *\n",
    "vllm/config/cache.py": '''
from typing import Literal
from vllm.config.transfer import TransferConfig
CacheDType = Literal["auto", "fp8"]
@config
class CacheConfig:
    block_size: SkipValidation[int] = None
    """Tokens in a block.

    More text."""
    cache_dtype: CacheDType = "auto"
    max_model_len: int | None = None
    caching: bool = True
    names: list[str] = field(default_factory=list)
    names_of: str | None = None
    transfer: TransferConfig | None = None
    either: "Literal['a'] | str" = "a"
    hidden: ClassVar[int] = 1
''',
    "vllm/config/transfer.py": """
@config
class TransferConfig:
    role: str = "x"
    port: int = 1
""",
    "vllm/entrypoints/openai/cli_args.py": """
@config
class BaseFrontendArgs:
    chat_template: str | None = None
@config
class FrontendArgs(BaseFrontendArgs):
    port: int = 8000
    middleware: list[str] = field(default_factory=lambda: [])
    enable_tools: bool = False
    def _customize_cli_kwargs(cls, frontend_kwargs):
        frontend_kwargs["middleware"]["action"] = "append"
        del frontend_kwargs["middleware"]["nargs"]
def make_arg_parser(parser):
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--headless", action="store_true")
""",
    "vllm/utils/argparse_utils.py": "class EnableDisableAction: pass\n",
    "vllm/envs.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    VLLM_FAST: bool = False
    VLLM_WAIT_S: int = 3
environment_variables = {
    "VLLM_FAST": lambda: os.getenv("VLLM_FAST", "0").lower() in ("1", "true"),
    "VLLM_WAIT_S": lambda: int(os.getenv("VLLM_WAIT_S", "3")),
}
""",
    "vllm-3.0.0.dist-info/METADATA": "Version: 3.0.0\n",
}


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def calls(tmp_path: Path) -> FlagTable:
    return flagtable.generate(wheel(tmp_path / "sglang-1.2.3-py3-none-any.whl", CALLS), "sglang")


def test_argparse_calls_are_read_without_importing(calls: FlagTable) -> None:
    options = calls.options
    assert (calls.version, calls.source) == ("1.2.3", "sglang-1.2.3-py3-none-any.whl")
    assert options["--model"].required
    assert options["--model"].help == "the weights"
    assert (options["--tp-size"].kind, options["--tp-size"].default) == ("int", 1)
    assert options["--backend"].choices == ("a", "b", "c")
    assert options["--no-graph"] is options["--graph"]
    assert (options["--fast"].kind, options["--fast"].nargs) == ("bool", 0)
    assert (options["--nodes"].kind, options["--nodes"].nargs) == ("int", "+")
    assert options["--extra"].kind == "json"
    assert (options["--old"].deprecated, options["--old"].use) == (True, "--fast")
    assert options["--gone"].refused == "use --fast"
    assert options["--reasoning-parser"].choices == ("glm45", "qwen3")
    assert "--help" in options


def test_environment_variables_are_declared_deprecated_or_only_mentioned(calls: FlagTable) -> None:
    variables = calls.variables
    assert (variables["SGLANG_FAST"].kind, variables["SGLANG_FAST"].default) == ("bool", True)
    assert variables["SGLANG_WAIT_S"].kind == "int"
    assert (variables["SGLANG_FORMER"].deprecated, variables["SGLANG_FORMER"].use) == (True, "use SGLANG_NEW")
    assert variables["SGLANG_OLD"].use == "it is always on"
    assert "SGLANG_UNDECLARED" in variables


def test_annotated_fields_are_read_from_an_unpacked_tree(tmp_path: Path) -> None:
    options = flagtable.generate(tree(tmp_path, FIELDS), "sglang").options
    assert options["--model"].required
    assert options["--load-format"].choices == ("auto", "dummy")
    assert options["--fp8-backend"].dest == "fp8_runner"
    assert options["--mode"].choices == ("ar", "rs")
    assert (options["--ports"].kind, options["--ports"].nargs) == ("int", "+")
    assert options["--fast"].nargs == 0
    assert options["--limit"].kind == "human_int"
    assert "--hidden" not in options
    assert "--plain" not in options
    assert options["--no-graph"] is options["--graph"]


def test_config_dataclasses_are_read_across_modules(tmp_path: Path) -> None:
    table = flagtable.generate(tree(tmp_path, VLLM), "vllm")
    options = table.options
    assert table.dotted
    assert table.underscores
    assert options["--block-size"].help == "Tokens in a block."
    assert options["--kv-cache-dtype"].choices == ("auto", "fp8")
    assert options["--max-model-len"].kind == "human_int_or_auto"
    assert options["--disable-caching"] is options["--enable-caching"]
    assert options["--enable-caching"].default is None
    assert (options["--names"].nargs, options["--names"].default) == ("+", [])
    assert options["-n"].kind == "json"
    assert options["--transfer"].keys == ("role", "port")
    assert (options["--either"].choices, options["--either"].open_choices) == (("a",), True)
    assert (options["--middleware"].repeat, options["--middleware"].nargs) == (True, None)
    assert options["--port"].default == 8000
    assert "--chat-template" in options
    assert "--headless" in options
    assert "--hidden" not in options
    assert (table.variables["VLLM_FAST"].kind, table.variables["VLLM_WAIT_S"].kind) == ("bool", "int")


def test_a_program_of_our_own_is_read_with_a_version_given(tmp_path: Path) -> None:
    program = tmp_path / "llama_serve.py"
    program.write_text('def options(p):\n    p.add_argument("--ctx-size", type=int)\n')
    table = flagtable.generate(program, "llama-server", "7.0")
    assert (table.version, table.options["--ctx-size"].kind) == ("7.0", "int")


@pytest.mark.parametrize(
    ("engine", "version", "said"),
    [
        ("vllm", None, "has no vllm/engine/arg_utils.py"),
        ("sglang", "9.9", "is sglang 1.2.3, not 9.9"),
        ("sgalng", None, 'Did you mean "sglang"'),
        ("llama-server", None, "has no llama_serve.py"),
    ],
)
def test_a_wrong_wheel_says_what_it_is(tmp_path: Path, engine: str, version: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        flagtable.generate(wheel(tmp_path / "w.whl", CALLS), engine, version)


def test_a_file_that_is_no_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.whl").write_text("not a zip")
    with pytest.raises(UsageError, match="not a wheel"):
        flagtable.generate(tmp_path / "w.whl", "sglang")
    with pytest.raises(UsageError, match="not a wheel"):
        flagtable.generate(tmp_path / "none.whl", "sglang")


def test_a_table_comes_back_as_it_was_written(tmp_path: Path, calls: FlagTable) -> None:
    path = flagtable.write(calls, tmp_path / "flags")
    assert path.name == "sglang-1.2.3.json"
    assert flagtable.load("sglang", "1.2.3", tmp_path / "flags") == calls
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_a_failed_write_leaves_the_old_table(
    tmp_path: Path, calls: FlagTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = flagtable.write(calls, tmp_path)

    def full(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    before = path.read_bytes()
    with pytest.raises(OSError, match="disk full"):
        flagtable.write(calls, tmp_path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir() if "json" in item.name] == [path.name]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a readable flag table"),
        ('{"schema_version": 99, "engine": "x", "version": "1"}', "schema 99"),
        ('{"schema_version": 1, "engine": "x"}', "not a flag table"),
    ],
)
def test_a_broken_table_is_a_usage_error(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x-1.json").write_text(text)
    with pytest.raises(UsageError, match=said):
        flagtable.load("x", "1", tmp_path)


def test_engines_with_dashes_keep_their_names(tmp_path: Path) -> None:
    for name in ("llama-server-2026.10.1", "vllm-0.9.0", "vllm-0.10.0"):
        (tmp_path / f"{name}.json").write_text("{}")
    assert flagtable.tables(tmp_path) == {"llama-server": ["2026.10.1"], "vllm": ["0.9.0", "0.10.0"]}


def test_the_difference_of_two_versions_is_told() -> None:
    old, new = flagtable.load("sglang", "0.5.10.post1"), flagtable.load("sglang", "0.5.23")
    change = flagtable.diff(old, new)
    assert "--attn-dp-size" in change.added
    assert "--nsa-prefill-backend" in change.removed
    assert "--disable-cuda-graph" in change.deprecated
    assert ("--attention-backend" in {name for name, _, _ in change.choices}) is True
    assert "SGLANG_ENABLE_SPEC_V2" in change.env_removed
    assert flagtable.diff(old, old) == flagtable.TableDiff((), (), (), (), (), (), ())


def test_a_table_is_one_json_object(calls: FlagTable) -> None:
    assert json.loads(flagtable.render(calls))["engine"] == "sglang"
