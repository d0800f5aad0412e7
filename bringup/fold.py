"""Constant folding over Python source that must not be imported: names, imports, literals, arithmetic."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bringup.errors import Problem, UsageError

DEPTH_LIMIT = 14
"""How far a name is followed through aliases and imports; real code needs five or six steps."""


class Unfolded(str):
    """The source text of an expression whose value is not known without running it."""


class Source:
    """The .py files of a wheel (a zip), of an unpacked tree, or one program alone, by path from its root."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._zip: zipfile.ZipFile | None = None
        if path.suffix == ".py":
            self.path, self.names = path.parent, frozenset({path.name})
            return
        if path.is_dir():
            self.names = frozenset(_walk(path))
            return
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise UsageError(
                Problem(
                    str(path),
                    f"not a wheel or source tree: {error}",
                    "Give a .whl file or its unpacked folder.",
                )
            ) from None
        self.names = frozenset(name for name in self._zip.namelist() if _wanted(name))

    def read(self, name: str) -> str:
        if self._zip is not None:
            return self._zip.read(name).decode("utf-8", "replace")
        return (self.path / name).read_text(encoding="utf-8", errors="replace")

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        if self._zip is not None:
            self._zip.close()


def _wanted(name: str) -> bool:
    return name.endswith((".py", ".dist-info/METADATA"))


def _walk(root: Path) -> Iterator[str]:
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        if _wanted(name) and path.is_file():
            yield name


@dataclass
class Module:
    """The top level of one module: what each name is bound to, and where imported names come from."""

    dotted: str
    is_package: bool = False
    body: list[ast.stmt] = field(default_factory=list)
    bound: dict[str, ast.AST] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [item for item in self.body if isinstance(item, ast.ClassDef)]


def _bind(module: Module, statement: ast.stmt, weak: bool = False) -> None:
    """Note what a top-level statement binds; `weak` bindings do not replace earlier ones."""

    def put(name: str, value: ast.AST) -> None:
        if weak:
            module.bound.setdefault(name, value)
        elif not isinstance(module.bound.get(name), ast.ClassDef):
            module.bound[name] = value

    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                put(target.id, statement.value)
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
        put(statement.target.id, statement.value)
    elif isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
        put(statement.name, statement)
    elif isinstance(statement, ast.ImportFrom) and statement.module:
        origin = _absolute(module, statement)
        for alias in statement.names:
            if alias.name == "*":
                module.stars.append(origin)
            module.imports.setdefault(alias.asname or alias.name, (origin, alias.name))
    elif isinstance(statement, ast.If):
        for inner in (*statement.body, *statement.orelse):
            _bind(module, inner, weak=True)
    elif isinstance(statement, ast.Try):
        for inner in statement.body:
            _bind(module, inner, weak=True)


def _absolute(module: Module, statement: ast.ImportFrom) -> str:
    if not statement.level:
        return statement.module or ""
    parts = module.dotted.split(".")
    up = statement.level - module.is_package
    return ".".join([*parts[: len(parts) - up], statement.module or ""])


class Folder:
    """Folds expressions of one package. `package` bounds which imports are followed."""

    def __init__(self, source: Source, package: str) -> None:
        self.source, self.package = source, package
        self._modules: dict[str, Module] = {}

    def module(self, dotted: str) -> Module:
        """A module's top level; an empty one when the package has no such file."""
        if dotted not in self._modules:
            self._modules[dotted] = module = Module(dotted)
            base = dotted.replace(".", "/")
            name = next((n for n in (f"{base}.py", f"{base}/__init__.py") if n in self.source.names), None)
            if name is not None:
                module.is_package = name.endswith("__init__.py")
                module.body = ast.parse(self.source.read(name)).body
                for statement in module.body:
                    _bind(module, statement)
        return self._modules[dotted]

    def lookup(self, name: str, module: Module, depth: int = 0) -> tuple[ast.AST | None, Module]:
        """What a name is bound to, through imports inside the package; (None, module) when unknown."""
        if name in module.bound:
            return module.bound[name], module
        if name in module.imports and depth < DEPTH_LIMIT:
            origin, original = module.imports[name]
            if origin.split(".")[0] == self.package:
                return self.lookup(original, self.module(origin), depth + 1)
        for origin in module.stars if depth < DEPTH_LIMIT else ():
            if origin.split(".")[0] == self.package:
                found, home = self.lookup(name, self.module(origin), depth + 1)
                if found is not None:
                    return found, home
        return None, module

    def value(
        self, node: ast.AST | None, module: Module, local: dict[str, ast.expr] | None = None, depth: int = 0
    ) -> Any:
        """The value of an expression; Unfolded (its text) when it cannot be known without running it."""
        if node is None:
            return None
        if depth <= DEPTH_LIMIT:
            try:
                return self._fold(node, module, local or {}, depth + 1)
            except (TypeError, ValueError, KeyError, IndexError, AttributeError, ZeroDivisionError):
                pass
        return Unfolded(ast.unparse(node))

    def _fold(self, node: ast.AST, module: Module, local: dict[str, ast.expr], depth: int) -> Any:
        def inner(item: ast.AST) -> Any:
            return self.value(item, module, local, depth)

        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [value for item in node.elts for value in self._items(item, inner)]
        if isinstance(node, ast.Dict):
            return {inner(k): inner(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -inner(node.operand)
        if isinstance(node, ast.BinOp):
            return _arithmetic(node, inner)
        if isinstance(node, ast.JoinedStr):
            return "".join(_piece(part) for part in node.values)
        if isinstance(node, ast.Name):
            return self._name(node, module, local, depth)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, module, depth)
        if isinstance(node, ast.Call):
            return self._call(node, module, inner, depth)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            return inner(node.values[-1])
        return Unfolded(ast.unparse(node))

    @staticmethod
    def _items(item: ast.expr, inner: Callable[[ast.AST], Any]) -> list[Any]:
        if not isinstance(item, ast.Starred):
            return [inner(item)]
        value = inner(item.value)
        return list(value) if isinstance(value, (list, dict)) else [Unfolded(f"*{value}")]

    def _name(self, node: ast.Name, module: Module, local: dict[str, ast.expr], depth: int) -> Any:
        if node.id in local:
            rest = {name: value for name, value in local.items() if name != node.id}
            return self.value(local[node.id], module, rest, depth)
        found, home = self.lookup(node.id, module)
        if isinstance(found, ast.expr):
            return self.value(found, home, None, depth)
        return Unfolded(node.id)

    def _attribute(self, node: ast.Attribute, module: Module, depth: int) -> Any:
        if isinstance(node.value, ast.Name):
            found, home = self.lookup(node.value.id, module)
            if isinstance(found, ast.ClassDef):
                return self.attribute(found, node.attr, home, depth)
        return Unfolded(ast.unparse(node))

    def attribute(self, cls: ast.ClassDef, name: str, module: Module, depth: int = 0) -> Any:
        """The value a class body gives an attribute."""
        for statement in cls.body:
            target = _target(statement)
            if target == name:
                return self.value(statement.value, module, None, depth)  # type: ignore[attr-defined]
        return Unfolded(f"{cls.name}.{name}")

    def _call(self, node: ast.Call, module: Module, inner: Callable[[ast.AST], Any], depth: int) -> Any:
        name = ast.unparse(node.func)
        if name in ("list", "set", "tuple", "frozenset", "sorted") and len(node.args) == 1:
            value = inner(node.args[0])
            if isinstance(value, (list, dict)):
                return sorted(value) if name == "sorted" else list(value)
        if name.endswith(".keys") and isinstance(node.func, ast.Attribute):
            value = inner(node.func.value)
            if isinstance(value, dict):
                return list(value)
        if name == "get_args" and node.args:
            values = self.literals(node.args[0], module, depth)
            if values is not None:
                return values
        if name == "get_field" and len(node.args) == 2 and isinstance(node.args[0], ast.Name):
            found, home = self.lookup(node.args[0].id, module)
            if isinstance(found, ast.ClassDef):
                return self.attribute(found, str(inner(node.args[1])), home, depth)
        if name.split(".")[-1] in ("field", "Field"):
            return self._field(node, inner)
        found = self.lookup(name, module)[0] if isinstance(node.func, ast.Name) else None
        if isinstance(found, ast.FunctionDef) and not node.args and not node.keywords:
            return self._returned(found, self.lookup(name, module)[1], depth)
        return Unfolded(ast.unparse(node))

    def _returned(self, function: ast.FunctionDef, module: Module, depth: int) -> Any:
        """What a function without arguments returns last, its own imports included."""
        view = Module(module.dotted, module.is_package, [], dict(module.bound), dict(module.imports))
        for statement in function.body:
            if isinstance(statement, ast.ImportFrom):
                _bind(view, statement)
        last = function.body[-1]
        return (
            self.value(last.value, view, None, depth)
            if isinstance(last, ast.Return)
            else Unfolded(function.name)
        )

    @staticmethod
    def _field(node: ast.Call, inner: Callable[[ast.AST], Any]) -> Any:
        """The default of dataclasses.field(...) or pydantic.Field(...)."""
        for keyword in node.keywords:
            if keyword.arg == "default":
                return inner(keyword.value)
            if keyword.arg == "default_factory":
                return _made(keyword.value, inner)
        return inner(node.args[0]) if node.args else None

    def literals(self, node: ast.AST, module: Module, depth: int = 0) -> list[Any] | None:
        """All values of an annotation's Literal[...] parts, through aliases and unions; None without any."""
        if depth > DEPTH_LIMIT:
            return None
        if isinstance(node, ast.Subscript):
            return self._literal_subscript(node, module, depth)
        if isinstance(node, ast.BinOp):
            left = self.literals(node.left, module, depth + 1)
            right = self.literals(node.right, module, depth + 1)
            return [*(left or []), *(right or [])] or None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                return self.literals(ast.parse(node.value, mode="eval").body, module, depth + 1)
            except SyntaxError:
                return None
        if isinstance(node, ast.Name):
            found, home = self.lookup(node.id, module)
            return self.literals(found, home, depth + 1) if isinstance(found, ast.expr) else None
        return None

    def _literal_subscript(self, node: ast.Subscript, module: Module, depth: int) -> list[Any] | None:
        head = ast.unparse(node.value).split(".")[-1]
        parts = elements(node)
        if head == "Literal":
            nested = [(self.literals(p, module, depth + 1) if _is_type(p) else None, p) for p in parts]
            return [v for found, p in nested for v in (found or [self.value(p, module)])]
        if head in ("Annotated", "A"):
            parts = parts[:1]
        elif head not in ("Optional", "Union", "list", "List", "tuple", "set", "SkipValidation"):
            return None
        return [v for p in parts for v in (self.literals(p, module, depth + 1) or [])] or None


def _is_type(node: ast.AST) -> bool:
    return isinstance(node, (ast.Subscript, ast.Name))


def elements(node: ast.Subscript) -> list[ast.expr]:
    """The parts of `X[a, b]`."""
    return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]


def _target(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def _piece(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    return "{" + ast.unparse(part.value) + "}" if isinstance(part, ast.FormattedValue) else ""


def _arithmetic(node: ast.BinOp, inner: Callable[[ast.AST], Any]) -> Any:
    left, right = inner(node.left), inner(node.right)
    if isinstance(left, Unfolded) or isinstance(right, Unfolded):
        return Unfolded(ast.unparse(node))
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, ast.LShift):
        return left << right
    if isinstance(node.op, ast.Pow):
        return left**right
    if isinstance(node.op, ast.Div):
        return left / right
    return Unfolded(ast.unparse(node))


def _made(node: ast.expr, inner: Callable[[ast.AST], Any]) -> Any:
    """What a default_factory makes, for the containers and lambdas that occur."""
    name = ast.unparse(node)
    if name in ("list", "set", "tuple"):
        return []
    if name == "dict":
        return {}
    return inner(node.body) if isinstance(node, ast.Lambda) else Unfolded(f"{name}()")
