"""An engine's own argument parser, asked for its options and verdicts; what is not installed is a stub.

Run as a program, in a process of its own: `python -S real.py ENGINE TREE [FOLDER ...] < lines.json`, the
engine's unpacked wheel first, then folders with the few libraries that make its dataclasses. Parsers need
none of what else they import (torch, CUDA kernels), only the names.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

HIDDEN = {
    "sglang": (
        "sglang.srt.layers",
        "sglang.srt.distributed",
        "sglang.srt.configs",
        "sglang.srt.utils.hf_transformers_patches",
    ),
    "vllm": ("vllm.distributed",),
}
"""Parts of an engine that hold kernels and no flags; they do not import without a GPU's libraries."""


class _StubType(abc.ABCMeta):
    """A class whose every attribute is another stub, so that any use of a missing library goes on."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stub(f"{cls.__name__}.{name}")

    def register(cls, *args: Any, **kwargs: Any) -> Any:
        return None

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class Stub(metaclass=_StubType):
    """What a missing library's names are: a class, a decorator, a function and a value at once."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__mro__[1] is Stub and len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stub(name)()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def __getitem__(self, key: Any) -> Any:
        return self

    def __lt__(self, other: Any) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__

    def __int__(self) -> int:
        return 0

    __index__ = __int__

    def __add__(self, other: Any) -> Any:
        return other

    __radd__ = __add__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stub)

    def __hash__(self) -> int:
        return 0


def _stub(name: str) -> Any:
    return _StubType(name.rsplit(".", 1)[-1], (Stub,), {})


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _stub(name)
        setattr(self, name, made)
        return made


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs: of the `hidden` modules when it comes first, of everything outside `package` when last."""

    def __init__(self, package: str = "", hidden: tuple[str, ...] = ()) -> None:
        self.package, self.hidden = package, hidden

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hidden = any(name == item or name.startswith(f"{item}.") for item in self.hidden)
        missing = self.package and name.split(".")[0] not in (self.package, *sys.stdlib_module_names)
        parent = sys.modules.get(name.rpartition(".")[0])
        if parent is not None and not isinstance(parent, _StubModule) and not hidden:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if hidden or missing else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.setdefault("__version__", "0")


def _any_version(name: str) -> str:
    """importlib.metadata.version for libraries that are stubs: newer than any check asks for."""
    try:
        return importlib.metadata.distribution(name).version
    except importlib.metadata.PackageNotFoundError:
        return "99.0"


def sglang_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found]

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def vllm_parser() -> argparse.ArgumentParser:
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser  # type: ignore[import-not-found]
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # type: ignore[import-not-found]
    _without_nested_defaults()
    parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
    return parser


def _without_nested_defaults() -> None:
    """Defaults of nested configs are whole configs, whose checks ask the GPU; flags do not need them."""
    from pydantic.fields import FieldInfo
    from vllm.config import VllmConfig  # type: ignore[import-not-found]

    for item in dataclasses.fields(VllmConfig):
        if isinstance(item.default, FieldInfo) and isinstance(item.default.default_factory, type):
            item.default.default_factory = dict


def described(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """Name, choices and nargs of each option string."""
    return [
        {
            "name": name,
            "choices": None if action.choices is None else [str(c) for c in action.choices if c is not None],
            "nargs": action.nargs,
        }
        for name, action in parser._option_string_actions.items()
    ]


class _Refused(Exception):
    pass


def verdicts(parser: argparse.ArgumentParser, lines: list[list[str]]) -> list[str]:
    """What the parser says to each command line: "" when it takes it, else its message."""

    def refuse(message: str) -> None:
        raise _Refused(message)

    parser.error = refuse  # type: ignore[method-assign,assignment]
    found = []
    for words in lines:
        try:
            parser.parse_args(list(words))
            found.append("")
        except (_Refused, ValueError, TypeError, AssertionError) as error:
            found.append(str(error) or type(error).__name__)
    return found


def main(argv: list[str]) -> None:
    """Description on stdout; with lines (JSON) on stdin, what the parser says to each of them too."""
    engine, folders = argv[0], argv[1:]
    sys.path[:0] = folders
    sys.meta_path.insert(0, _Stubs(hidden=HIDDEN[engine]))
    sys.meta_path.append(_Stubs(package=engine))
    importlib.metadata.version = _any_version  # type: ignore[assignment]
    lines = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        parser = sglang_parser() if engine == "sglang" else vllm_parser()
        options, said = described(parser), verdicts(parser, lines)
    json.dump({"options": options, "verdicts": said}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
