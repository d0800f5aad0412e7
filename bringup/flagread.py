"""Reading an engine's flags and environment variables out of its wheel, with `ast` alone.

SGLang has had three layouts: add_argument calls in server_args.py (to 0.5.13), Annotated fields there (0.5.14
to 0.5.19), and Annotated fields in arg_groups/fields/*.py (from 0.5.20). vLLM makes its flags from config
dataclasses named in engine/arg_utils.py and from the fields of its front end's dataclasses. A program of our
own with one argparse parser is read the same way.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bringup.errors import Problem, UsageError, did_you_mean
from bringup.flagtable import HELP_LIMIT, EnvVar, Flag, FlagTable
from bringup.fold import Folder, Module, Source, Unfolded, elements

_SAYS_DEPRECATED = re.compile(r"\W?deprecated\b|--[\w-]+ is deprecated\b", re.IGNORECASE)
_HELP = Flag(names=("-h", "--help"), dest="help", kind="bool", nargs=0)
_KIND_OF_TYPE = {
    "int": "int",
    "float": "float",
    "bool": "str",
    "str": "str",
    "json.loads": "json",
    "json_list_type": "json",
    "human_readable_int": "human_int",
    "human_readable_int_or_auto": "human_int_or_auto",
    "union_dict_and_str": "json_or_str",
}


def read(path: Path, engine: str, version: str | None = None) -> FlagTable:
    """The flag table of a wheel or tree; `version` names what has no METADATA to say it.

    Raises UsageError for anything that is not that engine's, or of another version than asked for.
    """
    reader = _READERS.get(engine)
    if reader is None:
        hint = did_you_mean(engine, _READERS) or f"Known: {', '.join(_READERS)}."
        raise UsageError(Problem(engine, "there is no flag reader for this engine", hint))
    with Source(path) as source:
        table = reader(source, path)
    table = replace(table, version=table.version or version or "")
    if not table.version or (version and table.version != version):
        what = table.version or "of unknown version"
        raise UsageError(
            Problem(
                str(path),
                f"is {engine} {what}, not {version or 'one that says its version'}",
                "Give the file of that version, or leave the version out.",
            )
        )
    return table


def _version(source: Source, path: Path) -> str:
    for name in sorted(source.names):
        if name.endswith(".dist-info/METADATA") and name.count("/") == 1:
            found = re.search(r"^Version: (\S+)", source.read(name), re.MULTILINE)
            if found:
                return found[1]
    raise UsageError(
        Problem(
            str(path),
            "holds no METADATA with a version",
            "Give the wheel, or unpack it whole, .dist-info too.",
        )
    )


def _lacking(path: Path, what: str) -> UsageError:
    return UsageError(
        Problem(
            str(path),
            f"has no {what}",
            "The wheel is of another engine, or of a layout that is not known yet.",
        )
    )


def _plain(value: Any) -> Any:
    """A folded value as JSON; what could not be folded is unknown (None)."""
    if isinstance(value, Unfolded):
        return None
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if isinstance(value, (str, int, float, bool, type(None))) else None


def _choices(value: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, (list, tuple, dict)):
        return None
    known = [item for item in value if not isinstance(item, Unfolded) and item is not None]
    return tuple(dict.fromkeys(known)) or None


def _first_line(text: Any) -> str:
    if not isinstance(text, str) or isinstance(text, Unfolded):
        return ""
    line = " ".join(text.split("\n\n")[0].split())
    return line if len(line) <= HELP_LIMIT else line[: HELP_LIMIT - 1].rstrip() + "…"


def _negatives(names: Iterable[str]) -> tuple[str, ...]:
    """argparse.BooleanOptionalAction's second spelling of each long name."""
    return tuple(f"--no-{name[2:]}" for name in names if name.startswith("--"))


@dataclass(frozen=True, slots=True)
class _Call:
    """One add_argument(...): its names and keyword expressions, with the names local to its function."""

    names: tuple[str, ...]
    keywords: dict[str, ast.expr]
    spread: ast.expr | None
    local: dict[str, ast.expr]


def _calls(function: ast.AST) -> Iterator[_Call]:
    local: dict[str, ast.expr] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            local.setdefault(node.targets[0].id, node.value)
    for node in ast.walk(function):
        if not (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"):
            continue
        words = [item.value for item in node.args if isinstance(item, ast.Constant)]
        names = tuple(word for word in words if isinstance(word, str) and word.startswith("-"))
        if names:
            keywords = {item.arg: item.value for item in node.keywords if item.arg}
            spread = next((item.value for item in node.keywords if item.arg is None), None)
            if isinstance(spread, ast.Dict):
                spread = _merged(spread, keywords)
            yield _Call(names, keywords, spread, local)


def _merged(mapping: ast.Dict, keywords: dict[str, ast.expr]) -> ast.expr | None:
    """`**{**inner, "key": value}`: the keys go to `keywords`, what is spread inside is returned."""
    inner: ast.expr | None = None
    for key, value in zip(mapping.keys, mapping.values, strict=True):
        if key is None:
            inner = value
        elif isinstance(key, ast.Constant):
            keywords[str(key.value)] = value
    return inner


def _dest(names: tuple[str, ...]) -> str:
    long = next((name for name in names if name.startswith("--")), names[0])
    return long.lstrip("-").replace("-", "_")


def _with_action(flag: Flag, action: str, fold: Callable[[str], Any], nargs_given: bool) -> Flag:
    """What an argparse action means for a flag: whether it takes a value, has a --no- twin, is deprecated."""
    use = str(fold("new_flag") or "")
    if action in ("store_true", "store_false", "store_const", "count"):
        return replace(flag, kind="bool", nargs=0)
    if action == "append":
        return replace(flag, repeat=True)
    if action.endswith("BooleanOptionalAction"):
        return replace(flag, kind="bool", nargs=0, negatives=_negatives(flag.names))
    if "Deprecated" not in action:
        return flag
    if action.endswith(("AliasStoreAction", "ConfigFileAction")):
        return replace(flag, deprecated=True, use=use)
    refused = str(fold("error_message") or "")
    nargs = flag.nargs if nargs_given else 0
    kind = flag.kind if nargs_given and nargs != 0 else "bool"
    return replace(flag, kind=kind, nargs=nargs, deprecated=True, use=use, refused=refused)


def _from_call(call: _Call, folder: Folder, module: Module, start: Flag | None = None) -> Flag:
    """A flag from one add_argument call; `start` holds what a spread of keywords already said."""

    def fold(key: str) -> Any:
        value = folder.value(call.keywords[key], module, call.local) if key in call.keywords else None
        return None if isinstance(value, Unfolded) else value

    base = start or Flag(names=call.names, dest=_dest(call.names))
    kind = (
        _KIND_OF_TYPE.get(ast.unparse(call.keywords["type"]), "str") if "type" in call.keywords else base.kind
    )
    choices = base.choices
    if "choices" in call.keywords:
        choices = _choices(folder.value(call.keywords["choices"], module, call.local))
    help_text = (
        folder.value(call.keywords["help"], module, call.local) if "help" in call.keywords else base.help
    )
    flag = replace(
        base,
        names=call.names,
        dest=str(fold("dest") or base.dest),
        kind=kind,
        nargs=fold("nargs") if "nargs" in call.keywords else base.nargs,
        choices=choices,
        default=_plain(fold("default")) if "default" in call.keywords else base.default,
        required=bool(fold("required")) or base.required,
        help=_first_line(help_text),
        deprecated=base.deprecated
        or bool(fold("deprecated"))
        or bool(_SAYS_DEPRECATED.match(str(help_text))),
    )
    if "action" not in call.keywords:
        return flag
    action = folder.value(call.keywords["action"], module)
    return _with_action(flag, str(action), fold, "nargs" in call.keywords)


def _unique(flags: Iterable[Flag]) -> tuple[Flag, ...]:
    """Flags in order of first mention; a later definition of the same names wins."""
    found: dict[tuple[str, ...], Flag] = {}
    for flag in flags:
        found[flag.names] = flag
    return tuple(found.values())


# SGLang ----------------------------------------------------------------------------------------------

_SGLANG_PARSERS = {
    "--reasoning-parser": (
        ("sglang.srt.parser.reasoning_parser_names", "REASONING_PARSER_NAMES"),
        ("sglang.srt.parser.reasoning_parser", "ReasoningParser.DetectorMap"),
    ),
    "--tool-call-parser": (
        ("sglang.srt.function_call.parser_names", "TOOL_CALL_PARSER_NAMES"),
        ("sglang.srt.function_call.function_call_parser", "FunctionCallParser.ToolCallParserEnum"),
    ),
}
"""Registries whose keys are a flag's choices; the parser computes them, so they are read where they stand."""


def _sglang(source: Source, path: Path) -> FlagTable:
    if "sglang/srt/server_args.py" not in source.names:
        raise _lacking(path, "sglang/srt/server_args.py")
    folder = Folder(source, "sglang")
    main = folder.module("sglang.srt.server_args")
    cls = main.bound.get("ServerArgs")
    if not isinstance(cls, ast.ClassDef):
        raise _lacking(path, "class ServerArgs")
    records = [*_sglang_records(folder, source), (cls, main)]
    defaults = _sglang_defaults(folder, records)
    flags = [flag for record, module in records for flag in _annotated(folder, record, module)]
    method = next((s for s in cls.body if isinstance(s, ast.FunctionDef) and s.name == "add_cli_args"), None)
    if method is None:
        raise _lacking(path, "ServerArgs.add_cli_args")
    for call in _calls(method):
        flags.append(_sglang_call(call, folder, main, defaults))
    flags = [_sglang_registry(folder, flag) for flag in flags]
    return FlagTable(
        engine="sglang",
        version=_version(source, path),
        source=path.name,
        flags=(_HELP, *_unique(flags)),
        env=_sglang_env(folder, source),
        env_prefixes=("SGLANG_",),
    )


def _sglang_records(folder: Folder, source: Source) -> list[tuple[ast.ClassDef, Module]]:
    prefix = "sglang/srt/arg_groups/fields/"
    names = sorted(name for name in source.names if name.startswith(prefix))
    modules = [folder.module(name[:-3].replace("/", ".")) for name in names]
    return [(cls, module) for module in modules for cls in module.classes]


def _sglang_defaults(folder: Folder, records: Iterable[tuple[ast.ClassDef, Module]]) -> dict[str, Any]:
    """Default of each field, for add_argument calls that point at it."""
    return {
        item.target.id: _plain(folder.value(item.value, module))
        for cls, module in records
        for item in cls.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.value is not None
    }


def _sglang_call(call: _Call, folder: Folder, module: Module, defaults: dict[str, Any]) -> Flag:
    flag = _from_call(call, folder, module)
    text = ast.unparse(call.keywords["default"]) if "default" in call.keywords else ""
    found = re.fullmatch(r"(?:ServerArgs\.|_declared_default\(['\"])(\w+)(?:['\"]\))?", text)
    if found:
        return replace(flag, default=defaults.get(found[1]))
    return flag


def _sglang_registry(folder: Folder, flag: Flag) -> Flag:
    for module_name, path in _SGLANG_PARSERS.get(flag.name, ()):
        module = folder.module(module_name)
        head, _, attribute = path.partition(".")
        bound = module.bound.get(head)
        if isinstance(bound, ast.ClassDef):
            value = folder.attribute(bound, attribute, module)
        else:
            value = folder.value(bound, module)
        names = _choices(value)
        if names is not None:
            auto = ("auto",) if "auto" in (flag.choices or ()) or "'auto'" in flag.help else ()
            return replace(flag, choices=tuple(dict.fromkeys((*auto, *names))))
    return flag


def _annotated(folder: Folder, cls: ast.ClassDef, module: Module) -> Iterator[Flag]:
    """Flags of `name: A[type, "help" or Arg(...)] = default` fields (sglang/srt/arg_groups/arg_utils.py)."""
    for item in cls.body:
        if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
            continue
        annotation = item.annotation
        if not (
            isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("A", "Annotated")
        ):
            continue
        parts = elements(annotation)
        meta = _arg_meta(folder, parts[1:], module)
        if meta is None or folder.value(meta.get("no_cli"), module) is True:
            continue
        yield _annotated_flag(folder, item, item.target.id, parts[0], meta, module)


def _arg_meta(folder: Folder, parts: list[ast.expr], module: Module) -> dict[str, ast.expr] | None:
    for part in parts:
        if isinstance(part, ast.Call) and ast.unparse(part.func) == "Arg":
            return {item.arg: item.value for item in part.keywords if item.arg}
        if isinstance(folder.value(part, module), str) and not isinstance(part, (ast.Name, ast.Call)):
            return {"help": part}
    return None


def _annotated_flag(
    folder: Folder,
    item: ast.AnnAssign,
    name: str,
    type_node: ast.expr,
    meta: dict[str, ast.expr],
    module: Module,
) -> Flag:
    def fold(key: str) -> Any:
        value = folder.value(meta.get(key), module)
        return None if isinstance(value, Unfolded) else value

    cli = str(fold("cli_name") or "--" + name.replace("_", "-"))
    kind, nargs = _annotated_shape(type_node, meta)
    flag = Flag(
        names=(cli, *(fold("aliases") or ())),
        dest=name,
        kind=kind,
        nargs=fold("nargs") if "nargs" in meta and nargs != 0 else nargs,
        choices=_choices(fold("choices")) or _choices(folder.literals(type_node, module)),
        default=_plain(folder.value(item.value, module)),
        required=item.value is None and fold("required") is not False,
        help=_first_line(folder.value(meta.get("help"), module)),
    )
    if "action" not in meta:
        return flag
    extra = meta.get("action_kwargs")
    pairs = zip(extra.keys, extra.values, strict=True) if isinstance(extra, ast.Dict) else ()
    keywords = {str(folder.value(key, module)): value for key, value in pairs if key is not None}
    flag = replace(
        flag,
        kind=_KIND_OF_TYPE.get(ast.unparse(keywords["type"]), "str") if "type" in keywords else "str",
        nargs=folder.value(keywords["nargs"], module) if "nargs" in keywords else None,
        choices=_choices(folder.value(keywords["choices"], module))
        if "choices" in keywords
        else flag.choices,
    )

    def fold_extra(key: str) -> Any:
        value = folder.value(keywords.get(key), module)
        return None if isinstance(value, Unfolded) else value

    return _with_action(flag, str(folder.value(meta["action"], module)), fold_extra, "nargs" in keywords)


def _annotated_shape(node: ast.expr, meta: dict[str, ast.expr]) -> tuple[str, int | str | None]:
    """(kind, nargs) that add_cli_args_from_dataclass derives from a field's type."""
    if "type_parser" in meta:
        return _KIND_OF_TYPE.get(ast.unparse(meta["type_parser"]), "str"), None
    text = ast.unparse(node)
    inner = re.sub(r"^Optional\[(.*)\]$", r"\1", re.sub(r"\s*\|\s*None$", "", text))
    listed = re.fullmatch(r"[Ll]ist(?:\[(.*)\])?", inner)
    if listed:
        return _KIND_OF_TYPE.get(listed[1] or "str", "str"), "+"
    if inner == "bool":
        return "bool", 0
    if inner.startswith("Literal["):
        return ("int" if re.match(r"Literal\[-?\d", inner) else "str"), None
    return _KIND_OF_TYPE.get(inner, "str"), None


_ENV_KINDS = {"Bool": "bool", "Int": "int", "Float": "float"}


def _sglang_env(folder: Folder, source: Source) -> tuple[EnvVar, ...]:
    module = folder.module("sglang.srt.environ")
    found: dict[str, EnvVar] = {}
    cls = module.bound.get("Envs")
    for item in cls.body if isinstance(cls, ast.ClassDef) else []:
        if not (isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)):
            continue
        if not (isinstance(item.value, ast.Call) and ast.unparse(item.value.func).startswith("Env")):
            continue
        name = item.targets[0].id
        maker = ast.unparse(item.value.func)
        kind = next((kind for part, kind in _ENV_KINDS.items() if part in maker), "str")
        default = _plain(folder.value(item.value.args[0], module)) if item.value.args else None
        found[name] = EnvVar(name, kind, default)
        for keyword in item.value.keywords:
            if keyword.arg == "deprecated_name":
                old = str(folder.value(keyword.value, module))
                found[old] = EnvVar(old, kind, None, True, f"use {name}")
    found.update(_sglang_old_env(folder, module))
    return _with_mentions(found, source, re.compile(r"""["'](SGLANG_[A-Z][A-Z0-9_]+)["']"""))


def _sglang_old_env(folder: Folder, module: Module) -> dict[str, EnvVar]:
    """Deprecated variables: the _DEPRECATED_ENVS registry, or the helper calls that came before it."""
    found: dict[str, EnvVar] = {}
    registry = module.bound.get("_DEPRECATED_ENVS")
    if isinstance(registry, ast.Dict):
        for key, value in zip(registry.keys, registry.values, strict=True):
            if isinstance(value, ast.Call) and key is not None:
                name = str(folder.value(key, module))
                said = {k.arg: folder.value(k.value, module) for k in value.keywords}
                use = f"use {said['replacement']}" if said.get("replacement") else str(said.get("note") or "")
                found[name] = EnvVar(name, "str", None, True, use)
    for statement in module.body:
        for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
            words = [folder.value(item, module) for item in call.args]
            helper = ast.unparse(call.func)
            if len(words) != 2 or any(type(word) is not str for word in words):
                continue
            if helper == "_print_deprecated_env":
                found[words[1]] = EnvVar(words[1], "str", None, True, f"use {words[0]}")
            elif helper == "_warn_deprecated_env_to_cli_flag":
                found[words[0]] = EnvVar(words[0], "str", None, True, words[1])
    return found


def _with_mentions(
    declared: dict[str, EnvVar], source: Source, pattern: re.Pattern[str]
) -> tuple[EnvVar, ...]:
    """Declared variables plus every name the code mentions: some are read without being declared."""
    names: set[str] = set()
    for name in source.names:
        if name.endswith(".py"):
            names.update(pattern.findall(source.read(name)))
    undeclared = (EnvVar(name) for name in names if name not in declared)
    return tuple(sorted((*declared.values(), *undeclared), key=lambda item: item.name))


# vLLM ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Types:
    """The members of an annotation's union, as vLLM's get_kwargs looks at them."""

    heads: frozenset[str]
    literal: tuple[Any, ...] | None
    element: str
    length: int | None
    record: tuple[str, ...] | None


_HUMAN_INTS = frozenset(
    {
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "kv_cache_memory_bytes",
        "safetensors_prefetch_block_size",
        "max_num_queued_tokens",
    }
)


class _Vllm:
    """One wheel's config dataclasses, read on demand."""

    def __init__(self, source: Source, path: Path) -> None:
        self.folder = Folder(source, "vllm")
        self.main = self.folder.module("vllm.engine.arg_utils")
        if not self.main.body:
            raise _lacking(path, "vllm/engine/arg_utils.py")
        self._configs: dict[str, dict[str, Flag]] = {}

    def config(self, name: str, module: Module) -> dict[str, Flag]:
        """Field name to the keywords get_kwargs would make of it, as a nameless flag."""
        if name not in self._configs:
            cls, home = self.folder.lookup(name, module)
            self._configs[name] = self._fields(cls, home) if isinstance(cls, ast.ClassDef) else {}
        return self._configs[name]

    def _fields(self, cls: ast.ClassDef, module: Module) -> dict[str, Flag]:
        found: dict[str, Flag] = {}
        for base in cls.bases:
            parent, home = self.folder.lookup(ast.unparse(base).split("[")[0], module)
            if isinstance(parent, ast.ClassDef):
                found.update(self._fields(parent, home))
        for position, item in enumerate(cls.body):
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                text = ast.unparse(item.annotation)
                if not text.startswith(("ClassVar", "InitVar")):
                    found[item.target.id] = self._field(
                        item, item.target.id, _doc(cls.body, position + 1), module
                    )
        return found

    def _keys(self, cls: ast.ClassDef, module: Module) -> tuple[str, ...]:
        """What a JSON value for a config class may hold: its fields and what only its constructor takes."""
        found: dict[str, None] = {}
        for base in cls.bases:
            parent, home = self.folder.lookup(ast.unparse(base).split("[")[0], module)
            if isinstance(parent, ast.ClassDef):
                found.update(dict.fromkeys(self._keys(parent, home)))
        for item in cls.body:
            if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
                continue
            if not ast.unparse(item.annotation).startswith("ClassVar"):
                found[item.target.id] = None
        return tuple(found)

    def _field(self, item: ast.AnnAssign, name: str, doc: str, module: Module) -> Flag:
        types = self._types(item.annotation, module)
        kind, nargs, choices, opened = _shape(types, name)
        return Flag(
            names=("",),
            dest=name,
            kind=kind,
            nargs=nargs,
            choices=choices,
            open_choices=opened,
            optional="None" in types.heads and "bool" not in types.heads,
            default=_plain(self.folder.value(item.value, module)),
            keys=types.record or (),
            help=_first_line(doc),
        )

    def _types(self, node: ast.AST, module: Module) -> _Types:
        heads: set[str] = set()
        record: tuple[str, ...] | None = None
        element, length = "str", None
        for part, home in self._members(node, module, 0):
            if isinstance(part, ast.Subscript):
                head = ast.unparse(part.value).split(".")[-1].lower()
                if head in ("list", "set", "tuple", "sequence"):
                    inner = elements(part)
                    element = ast.unparse(inner[0])
                    plain = head == "tuple" and not any(ast.unparse(item) == "..." for item in inner)
                    length = len(inner) if plain else None
            else:
                head = ast.unparse(part).split(".")[-1]
            if isinstance(part, ast.Name):
                cls, place = self.folder.lookup(part.id, home)
                if record is None and isinstance(cls, ast.ClassDef) and _is_record(cls):
                    record = self._keys(cls, place)
                head = "dict" if isinstance(cls, ast.ClassDef) and _is_dict(cls) else head
            heads.add(head)
        literal = self.folder.literals(node, module)
        return _Types(frozenset(heads), tuple(literal) if literal else None, element, length, record)

    def _members(self, node: ast.AST, module: Module, depth: int) -> Iterator[tuple[ast.AST, Module]]:
        """The members of a union, through aliases, Optional, Annotated and quoted annotations."""
        if depth > 8:
            return
        if isinstance(node, ast.BinOp):
            yield from self._members(node.left, module, depth + 1)
            yield from self._members(node.right, module, depth + 1)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from self._members(ast.parse(node.value, mode="eval").body, module, depth + 1)
        elif isinstance(node, ast.Subscript):
            yield from self._subscript(node, module, depth)
        elif isinstance(node, ast.Name):
            found, home = self.folder.lookup(node.id, module)
            if isinstance(found, ast.expr):
                yield from self._members(found, home, depth + 1)
            else:
                yield node, module
        else:
            yield node, module

    def _subscript(self, node: ast.Subscript, module: Module, depth: int) -> Iterator[tuple[ast.AST, Module]]:
        head = ast.unparse(node.value).split(".")[-1]
        parts = elements(node)
        if head in ("Annotated", "SkipValidation"):
            yield from self._members(parts[0], module, depth + 1)
        elif head in ("Optional", "Union"):
            for part in parts:
                yield from self._members(part, module, depth + 1)
            if head == "Optional":
                yield ast.Constant(None), module
        else:
            yield node, module


def _is_record(cls: ast.ClassDef) -> bool:
    marks = {ast.unparse(item).split("(")[0].split(".")[-1] for item in cls.decorator_list}
    return bool(marks & {"dataclass", "config"})


def _is_dict(cls: ast.ClassDef) -> bool:
    return any(ast.unparse(base).startswith(("dict", "Dict", "TypedDict")) for base in cls.bases)


def _doc(body: list[ast.stmt], position: int) -> str:
    item = body[position] if position < len(body) else None
    if (
        isinstance(item, ast.Expr)
        and isinstance(item.value, ast.Constant)
        and isinstance(item.value.value, str)
    ):
        return item.value.value
    return ""


def _shape(types: _Types, name: str) -> tuple[str, int | str | None, tuple[Any, ...] | None, bool]:
    """(kind, nargs, choices, open) in the order of get_kwargs (vllm/engine/arg_utils.py)."""
    heads = types.heads
    if types.record is not None:
        return "json", None, None, False
    if heads == {"bool", "str", "None"}:
        return "str", "?", None, False
    if "bool" in heads:
        return "bool", 0, None, False
    if "literal" in heads:
        return _kind_of(types.literal), None, types.literal, "str" in heads
    if heads & {"tuple", "list", "set", "sequence"}:
        nargs: int | str = types.length if types.length is not None else "+"
        return _KIND_OF_TYPE.get(types.element, "str"), nargs, types.literal, False
    if "int" in heads:
        if name == "max_model_len":
            return "human_int_or_auto", None, None, False
        return ("human_int" if name in _HUMAN_INTS else "int"), None, None, False
    if "float" in heads:
        return "float", None, None, False
    if "dict" in heads:
        others = heads - {"dict", "None"}
        return ("json_or_str" if others else "json"), None, None, False
    return "str", None, None, False


def _kind_of(values: tuple[Any, ...] | None) -> str:
    return "int" if values and all(isinstance(value, int) for value in values) else "str"


def _vllm(source: Source, path: Path) -> FlagTable:
    reader = _Vllm(source, path)
    flags: list[Flag] = []
    for name in ("EngineArgs", "AsyncEngineArgs"):
        cls = reader.main.bound.get(name)
        for item in cls.body if isinstance(cls, ast.ClassDef) else []:
            if isinstance(item, ast.FunctionDef) and item.name == "add_cli_args":
                flags += _vllm_calls(reader, item, reader.main)
    flags += _vllm_frontend(reader, source, path)
    paired = "class EnableDisableAction" in source.read("vllm/utils/argparse_utils.py")
    return FlagTable(
        engine="vllm",
        version=_version(source, path),
        source=path.name,
        flags=(_HELP, *_unique(_pairs(flag, paired) for flag in flags)),
        env=_vllm_env(reader.folder, source),
        underscores=True,
        dotted=True,
        env_prefixes=("VLLM_",),
    )


def _pairs(flag: Flag, paired: bool) -> Flag:
    """Every bool field is a BooleanOptionalAction; newer versions also pair --enable-x with --disable-x."""
    if flag.kind != "bool" or not flag.negatives or not paired:
        return flag
    swap = {"--enable-": "--disable-", "--disable-": "--enable-"}
    others = [
        new + name.removeprefix(old)
        for name in flag.names
        for old, new in swap.items()
        if name.startswith(old)
    ]
    return replace(flag, negatives=(*flag.negatives, *others))


def _vllm_frontend(reader: _Vllm, source: Source, path: Path) -> list[Flag]:
    files = sorted(
        name
        for name in source.names
        if name.startswith("vllm/entrypoints/") and name.endswith("/cli_args.py")
    )
    for name in files:
        module = reader.folder.module(name[:-3].replace("/", "."))
        cls = module.bound.get("FrontendArgs")
        if isinstance(cls, ast.ClassDef):
            break
    else:
        raise _lacking(path, "class FrontendArgs in vllm/entrypoints/**/cli_args.py")
    changes = [
        change
        for item in module.classes
        for method in item.body
        if isinstance(method, ast.FunctionDef)
        for change in _changes(method)
    ]
    flags = []
    for field_name, flag in reader.config("FrontendArgs", module).items():
        named = replace(flag, names=("--" + field_name.replace("_", "-"),), dest=field_name)
        named = _changed(named, [c for c in changes if c.field == field_name], reader.folder, module)
        flags.append(_boolean(named))
    function = module.bound.get("make_arg_parser")
    return flags + (_vllm_calls(reader, function, module) if function is not None else [])


def _boolean(flag: Flag) -> Flag:
    return replace(flag, negatives=_negatives(flag.names)) if flag.kind == "bool" else flag


@dataclass(frozen=True, slots=True)
class _Change:
    """`kwargs["field"]["key"] = value` (or +=, .remove(value), del) between get_kwargs and add_argument."""

    variable: str
    field: str
    key: str
    how: str
    value: ast.expr | None


def _changes(function: ast.AST) -> Iterator[_Change]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            yield from _change(node.targets[0], "set", node.value)
        elif isinstance(node, ast.AugAssign):
            yield from _change(node.target, "add", node.value)
        elif isinstance(node, ast.Delete):
            yield from _change(node.targets[0], "del", None)
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "remove"
        ):
            yield from _change(node.func.value, "remove", node.args[0])


def _change(target: ast.AST, how: str, value: ast.expr | None) -> Iterator[_Change]:
    if not (isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant)):
        return
    key = str(target.slice.value)
    inner = target.value
    if isinstance(inner, ast.Name):
        yield _Change(inner.id, "", key, how, value)
        return
    if not (isinstance(inner, ast.Subscript) and isinstance(inner.value, ast.Name)):
        return
    if isinstance(inner.slice, ast.Constant):
        yield _Change(inner.value.id, str(inner.slice.value), key, how, value)


def _changed(flag: Flag, changes: Iterable[_Change], folder: Folder, module: Module) -> Flag:
    for change in changes:
        text = ast.unparse(change.value) if change.value is not None else ""
        if change.key == "type":
            flag = replace(
                flag, kind=_kind_of_type(text), optional=flag.optional or text.startswith("optional_type")
            )
        elif change.key == "nargs":
            flag = replace(flag, nargs=None)
        elif change.key == "action" and text == "'append'":
            flag = replace(flag, repeat=True, nargs=None)
        elif change.key == "choices":
            flag = replace(flag, choices=_changed_choices(flag, change, folder, module))
    return flag


def _kind_of_type(text: str) -> str:
    if ".lower()" in text:
        return "name"
    inner = re.sub(r"^(?:optional_type|parse_type)\((.*)\)$", r"\1", text)
    return _KIND_OF_TYPE.get(inner, "str")


def _changed_choices(flag: Flag, change: _Change, folder: Folder, module: Module) -> tuple[Any, ...] | None:
    now = flag.choices or ()
    if change.how == "remove":
        gone = folder.value(change.value, module)
        return tuple(choice for choice in now if choice != gone)
    if (
        change.how == "add"
        and isinstance(change.value, ast.ListComp)
        and "permutations" in ast.unparse(change.value)
    ):
        import itertools

        return (*now, *(",".join(pair) for pair in itertools.permutations(now, r=2)))
    return now or None


def _vllm_calls(reader: _Vllm, function: ast.AST, module: Module) -> list[Flag]:
    """add_argument("--x", **kwargs_of_Config["field"], ...) calls of one function."""
    owner: dict[str, str] = {}
    alias: dict[str, tuple[str, str]] = {}
    for node in ast.walk(function):
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        name, value = node.targets[0].id, node.value
        if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("get_kwargs") and value.args:
            owner[name] = ast.unparse(value.args[0])
        elif isinstance(value, ast.Subscript) and isinstance(value.value, ast.Call):
            if ast.unparse(value.value.func).endswith("get_kwargs") and value.value.args:
                owner[name] = ast.unparse(value.value.args[0])
                alias[name] = (name, str(reader.folder.value(value.slice, module)))
        elif isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
            alias[name] = (value.value.id, str(reader.folder.value(value.slice, module)))
    changes = list(_changes(function))
    flags = []
    for call in _calls(function):
        variable, field_name = _spread(call, alias, reader.folder, module)
        start = reader.config(owner.get(variable, ""), module).get(field_name)
        if start is not None:
            mine = [
                c
                for c in changes
                if (c.variable, c.field) == (variable, field_name)
                or alias.get(c.variable) == (variable, field_name)
            ]
            start = _changed(replace(start, dest=_dest(call.names)), mine, reader.folder, module)
        flag = _from_call(call, reader.folder, module, start)
        flags.append(_boolean(flag) if start is not None else flag)
    return flags


def _spread(
    call: _Call, alias: dict[str, tuple[str, str]], folder: Folder, module: Module
) -> tuple[str, str]:
    """(variable, field) of `**variable["field"]`, directly or through a name bound to it."""
    node = call.spread
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return node.value.id, str(folder.value(node.slice, module))
    return alias.get(node.id, ("", "")) if isinstance(node, ast.Name) else ("", "")


def _vllm_env(folder: Folder, source: Source) -> tuple[EnvVar, ...]:
    module = folder.module("vllm.envs")
    registry = module.bound.get("environment_variables")
    typed = {
        item.target.id: item
        for block in module.body
        if isinstance(block, ast.If)
        for item in block.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    found: dict[str, EnvVar] = {}
    if isinstance(registry, ast.Dict):
        for key, value in zip(registry.keys, registry.values, strict=True):
            name = str(folder.value(key, module))
            declared = typed.get(name)
            default = _plain(folder.value(declared.value, module)) if declared is not None else None
            found[name] = EnvVar(name, _env_kind(ast.unparse(value), declared), default)
    return _with_mentions(found, source, re.compile(r"""["'](VLLM_[A-Z][A-Z0-9_]+)["']"""))


def _env_kind(text: str, declared: ast.AnnAssign | None) -> str:
    if "int(os." in text or "int(" in text:
        return "int"
    if "float(" in text:
        return "float"
    annotation = ast.unparse(declared.annotation) if declared is not None else ""
    return "bool" if annotation == "bool" else "str"


# A program of our own --------------------------------------------------------------------------------


def _program(source: Source, path: Path) -> FlagTable:
    """One program with one argparse parser: the server around llama.cpp. Its version is given by hand."""
    name = next((name for name in sorted(source.names) if name.endswith("llama_serve.py")), None)
    if name is None:
        raise _lacking(path, "llama_serve.py")
    folder = Folder(source, "bringup")
    module = folder.module(name[:-3].replace("/", "."))
    functions = [item for item in module.body if isinstance(item, ast.FunctionDef)]
    flags = [_from_call(call, folder, module) for item in functions for call in _calls(item)]
    exact = "allow_abbrev=False" in source.read(name)
    return FlagTable("llama-server", "", Path(name).name, (_HELP, *_unique(flags)), prefixes=not exact)


_READERS: dict[str, Callable[[Source, Path], FlagTable]] = {
    "sglang": _sglang,
    "vllm": _vllm,
    "llama-server": _program,
}
