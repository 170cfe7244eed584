"""A piece of an app's code, with everything that it refers to, as plain values that can be compared and hashed.

A survey walks from a function to everything it names. Each definition becomes a row: its syntax tree, without positions
and docstrings, and for every name from outside what it refers to. Rows refer to each other by number, in the order in
which they are found, so cycles are not a problem and no module names are included.
"""

from __future__ import annotations

import ast
import dataclasses
import dis
import enum
import functools
import hashlib
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from headrace.model.app import App
from headrace.model.operator import Function, Operator

Plain = Any  # lists, strings and numbers
Scope = Mapping[str, Any]
Chain = tuple[str, ...]  # a name, and the attributes after it
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

FRAMEWORK = "headrace"
INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python")
FROM_OUTSIDE = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS")
LEFT_OUT = ("ctx", "kind", "type_comment", "type_ignores")  # of a syntax tree: without meaning, or not in every Python
MODULES_MAX = 10  # through which a name may have been imported
DIGEST_BYTES = 16
SCALARS = (bool, int, float, complex, str, bytes, Decimal, date, time, timedelta, UUID, re.Pattern)


class Home:
    """Which modules are the app's own: those of its functions, their packages, and what is beside them; but nothing
    that is installed, and nothing of the framework except the package that an app is in."""

    def __init__(self, app: App) -> None:
        self.packages: set[str] = set()
        self.folders: set[str] = set()
        for function in app.functions:
            scope = function.body.__globals__
            spec = scope.get("__spec__")  # of python -m package.module: it has the name under which others import it
            self.packages.add(package_of(function.body.__module__))
            self._add(function.body.__module__ if spec is None else spec.name, scope.get("__file__"))

    def _add(self, module: str, file: Any) -> None:
        self.packages.add(package_of(module))
        if isinstance(file, str):
            parts = file.replace("\\", "/").split("/")
            above = module.count(".") + (2 if parts[-1] == "__init__.py" else 1)
            folder = "/".join(parts[:-above]) + "/"
            if len(folder) > 1 and not any(mark in folder for mark in INSTALLED):
                self.folders.add(folder)

    def owns(self, module: str | None, file: Any) -> bool:
        if module is None:
            return False
        package = package_of(module)
        if package in self.packages or package.partition(".")[0] == FRAMEWORK:
            return package in self.packages
        path = file.replace("\\", "/") if isinstance(file, str) else ""
        return path.startswith(tuple(self.folders)) and not any(mark in path for mark in INSTALLED)


def package_of(module: str) -> str:
    """The top-level package of a module; inside the framework, the part."""
    return ".".join(module.split(".")[: 2 if module.startswith(f"{FRAMEWORK}.") else 1])


class SourceDefinition(NamedTuple):
    """A definition as written in the source: a digest of its syntax tree, the names that it takes from outside, and
    where those are found."""

    digest: str
    chains: list[Chain]
    scope: Scope


class Survey:
    """Describes the functions of one app. `records` are types that are separate parts."""

    def __init__(self, app: App, records: Mapping[type, str]) -> None:
        self.app, self.records, self.home, self.trees = app, records, Home(app), Trees()
        self._written: dict[Any, SourceDefinition] = {}

    def function(self, function: Function) -> Plain:
        """A registered function and everything that it refers to."""
        return Walk(self, function.body).rows

    def value(self, value: Any) -> Plain:
        """The same for any value: a combine, a constant."""
        return Walk(self, value).rows

    def methods(self, record: type) -> Plain:
        """Everything of a record type except its fields: their names, types and defaults."""
        return Walk(self, None, record).rows

    def default(self, record: type, field: str, value: Any) -> Plain:
        """The default of a field, or its factory: as it is written, and as it is."""
        for owner in record.__mro__:
            node = find_class(self.trees.of(owner), owner) if field in annotated(owner) else None
            given = None if node is None else field_in(node, field)
            if given is not None:
                module = inspect.getmodule(owner)
                scope: Scope = {} if module is None else vars(module)
                written = SourceDefinition(digest_of(plain(given)), sorted(set(chains_in(given))), scope)
                return Walk(self, value, written=written).rows
        return Walk(self, value).rows

    # --- used by the walks ---

    def owns(self, thing: Any) -> bool:
        module = getattr(thing, "__module__", None)
        if isinstance(thing, FunctionType):
            return self.home.owns(module, thing.__globals__.get("__file__"))
        return self.home.owns(module, getattr(inspect.getmodule(thing), "__file__", None))

    def owns_module(self, module: ModuleType) -> bool:
        return self.home.owns(module.__name__, getattr(module, "__file__", None))

    def is_registered(self, thing: Any) -> bool:
        if not isinstance(thing, Function):
            return False
        operator = self.app.operators.get(thing.operator.name)
        return operator is thing.operator and operator.functions.get(thing.name) is thing

    def written(self, thing: Any, is_record: bool = False) -> SourceDefinition:
        """The source of a function, a class or a global object. What many refer to is read once."""
        found = self._written.get((thing, is_record))
        if found is None:
            if isinstance(thing, FunctionType):
                found = self._function(thing)
            else:
                found = self._class(thing, is_record) if isinstance(thing, type) else self._statements(*thing)
            self._written[thing, is_record] = found
        return found

    def _function(self, function: FunctionType) -> SourceDefinition:
        code = function.__code__
        node = self.trees.definition(function)
        names = set(names_from_outside(code))
        if node is None:
            chains: set[Chain] = {(name,) for name in names}
            chains |= {(name, attribute) for name in names for attribute in names_in(code)}
            return SourceDefinition(digest_of(plain_code(code)), sorted(chains), scope_of(function))
        decorators = {chain for above in decorators_of(node) for chain in chains_in(above)}
        chains = {chain for chain in chains_in(node) if chain[0] in names} | decorators
        return SourceDefinition(digest_of(plain(node)), sorted(chains), scope_of(function))

    def _class(self, cls: type, is_record: bool) -> SourceDefinition:
        node = find_class(self.trees.of(cls), cls)
        module = inspect.getmodule(cls)
        scope: dict[str, Any] = {} if module is None else dict(vars(module))
        for member in vars(cls).values():
            body = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if isinstance(body, FunctionType):
                scope |= scope_of(body)
        if node is None:
            scope = {name: value for name, value in vars(cls).items() if is_code(value)}
            scope |= {f"base {number}": base for number, base in enumerate(cls.__bases__)}
            return SourceDefinition("", sorted((name,) for name in scope), scope)
        node = without_fields(node, annotated(cls)) if is_record else node
        return SourceDefinition(digest_of(plain(node)), sorted(set(chains_in(node))), scope)

    def _statements(self, module_name: str, name: str) -> SourceDefinition:
        module = module_named(module_name)
        tree = None if module is None else self.trees.of(module)
        if module is None or tree is None:
            return SourceDefinition("", [], {})
        statements = list(makers(tree, name))
        chains = {chain for statement in statements for chain in chains_in(statement) if chain[0] != name}
        return SourceDefinition(digest_of([plain(statement) for statement in statements]), sorted(chains), vars(module))


class Trees:
    """Syntax trees of whole files, each parsed once, and where in them the functions are."""

    def __init__(self) -> None:
        self._by_file: dict[str, ast.Module] = {}
        self._definitions: dict[ast.Module, dict[tuple[str, int], list[Definition]]] = {}

    def of(self, thing: Any) -> ast.Module | None:
        """The tree of the file that a function, class or module comes from; None if there is no source."""
        try:
            file = inspect.getsourcefile(thing) or inspect.getfile(thing)
            if file not in self._by_file:
                lines, _ = inspect.findsource(inspect.getmodule(thing) or thing)
                tree = self._by_file[file] = ast.parse("".join(lines))
                self._definitions[tree] = definitions_in(tree)
        except (OSError, TypeError, SyntaxError, ValueError):
            return None
        return self._by_file[file]

    def definition(self, function: FunctionType) -> Definition | None:
        """The function that this code was compiled from."""
        code, tree = function.__code__, self.of(function)
        found = [] if tree is None else self._definitions[tree].get((code.co_name, code.co_firstlineno), [])
        fitting = [node for node in found if not isinstance(node, ast.Lambda) or holds(node, code)]
        return fitting[0] if fitting else None


class Walk:
    """One walk: the rows of everything that can be reached from one value."""

    def __init__(
        self, survey: Survey, value: Any, record: type | None = None, written: SourceDefinition | None = None
    ) -> None:
        self.survey = survey
        self.rows: list[Plain] = []
        self._numbers: dict[Any, int] = {}
        self._ahead: list[Any] = []
        bases = set() if record is None else set(record.__mro__)  # their fields are this record's too
        self.rows.append(self.describe(value) if record is None else self._row(record, is_record=True))
        if written is not None:
            self.rows.append([written.digest, self._references(written.chains, written.scope)])
        for thing in self._ahead:  # grows during the walk
            self.rows.append(self._row(thing, is_record=thing in bases))

    # --- values ---

    def describe(self, value: Any, scope: Scope | None = None, name: str = "") -> Plain:
        """What a name refers to; `scope` and `name` say where it was found."""
        if value is None or value is Ellipsis or value is NotImplemented:
            return [repr(value)]
        if isinstance(value, Function):
            return ["function", value.full_name] if self.survey.is_registered(value) else self.describe(value.body)
        if isinstance(value, Operator | App):
            return [type(value).__name__, value.name]
        if isinstance(value, enum.Enum):
            return ["member", self.describe(type(value)), value.name]
        if isinstance(value, SCALARS):
            return [type(value).__name__, repr(value)]
        if isinstance(value, tuple | frozenset):
            parts = [self.describe(part) for part in value]
            return [type(value).__name__, parts if isinstance(value, tuple) else sorted(parts, key=repr)]
        if isinstance(value, ModuleType):
            return ["module", "" if self.survey.owns_module(value) else value.__name__]
        if isinstance(value, FunctionType | type):
            return self._definition(value)
        return self._object(value, scope, name)

    def _definition(self, value: FunctionType | type) -> Plain:
        if value in self.survey.records:
            return ["type", self.survey.records[value]]  # type: ignore[index]
        if not self.survey.owns(value):
            return ["outside", value.__module__, value.__qualname__]
        return ["row", self._number(value)]

    def _object(self, value: Any, scope: Scope | None, name: str) -> Plain:
        if isinstance(value, MethodType):
            return ["method", self.describe(value.__func__), self.describe(value.__self__)]
        if isinstance(value, BuiltinFunctionType):
            return ["outside", value.__module__ or "", value.__qualname__]
        if isinstance(value, functools.partial):
            named = [[key, self.describe(value.keywords[key])] for key in sorted(value.keywords)]
            return ["partial", self.describe(value.func), [self.describe(arg) for arg in value.args], named]
        if hasattr(value, "__wrapped__"):  # by lru_cache and the like, which are above it in the source
            return ["wraps", self.describe(value.__wrapped__)]
        if isinstance(value, property):
            return ["property", *(self.describe(part) for part in (value.fget, value.fset, value.fdel))]
        if isinstance(value, staticmethod | classmethod):
            return [type(value).__name__, self.describe(value.__func__)]
        made = None if scope is None else self._made(scope, name)
        return made or ["object", self.describe(type(value))]

    def _made(self, scope: Scope, name: str) -> Plain | None:
        """The statements that made a global object, in their module."""
        module = module_named(scope.get("__name__"))
        for _ in range(MODULES_MAX):
            tree = None if module is None else self.survey.trees.of(module)
            if tree is None or module is None:
                return None
            if any(True for _ in makers(tree, name)):
                return ["row", self._number((module.__name__, name))]
            found = next(imports(tree, name, vars(module).get("__package__")), None)
            if found is None:
                return None
            origin, name = found
            module = module_named(origin)
            if module is not None and not self.survey.owns_module(module):
                return ["outside", origin, name]
        return None

    def _number(self, thing: Any) -> int:
        if thing not in self._numbers:
            self._ahead.append(thing)
            self._numbers[thing] = len(self._ahead)
        return self._numbers[thing]

    # --- rows ---

    def _row(self, thing: Any, is_record: bool = False) -> Plain:
        written = self.survey.written(thing, is_record)
        row = [written.digest, self._references(written.chains, written.scope)]
        if isinstance(thing, FunctionType):
            row += [self.describe(value) for value in thing.__defaults__ or ()]
            row += [[name, self.describe(value)] for name, value in sorted((thing.__kwdefaults__ or {}).items())]
        return row

    def _references(self, chains: list[Chain], scope: Scope) -> Plain:
        """What the names refer to: `a.b.c` is followed through modules of the app's own; from there on it is a
        value."""
        found = []
        for chain in chains:
            if chain[0] not in scope:
                continue  # a builtin, or bound later
            value, where, name = scope[chain[0]], scope, chain[0]
            for step in chain[1:]:
                if not isinstance(value, ModuleType) or step not in vars(value):
                    break
                if not self.survey.owns_module(value):
                    break
                value, where, name = vars(value)[step], vars(value), step
            found.append([".".join(chain), self.describe(value, where, name)])
        return found


def module_named(name: Any) -> ModuleType | None:
    """A module that was imported before."""
    try:
        return importlib.import_module(name)
    except (ImportError, TypeError, AttributeError, ValueError):
        return None


def digest_of(value: Plain) -> str:
    data = msgspec.msgpack.encode(value, order="sorted")
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def is_code(value: Any) -> bool:
    return isinstance(value, FunctionType | property | staticmethod | classmethod)


# --- from code objects ------------------------------------------------------------------------------------------------


def scope_of(function: FunctionType) -> dict[str, Any]:
    """The present values of a function's free names."""
    scope = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            scope[name] = cell.cell_contents
        except ValueError:  # not bound yet
            scope.pop(name, None)
    return scope


def codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def names_from_outside(code: CodeType) -> Iterator[str]:
    for part in codes_in(code):
        for instruction in dis.get_instructions(part):
            if instruction.opname in FROM_OUTSIDE and isinstance(instruction.argval, str):
                yield instruction.argval


def names_in(code: CodeType) -> set[str]:
    return {name for part in codes_in(code) for name in part.co_names}


def plain_code(code: CodeType) -> Plain:
    """Without source: the code object itself. It differs from one Python to the next."""
    constants = [plain_code(part) if isinstance(part, CodeType) else stable_constant(part) for part in code.co_consts]
    return ["code", code.co_code.hex(), constants, list(code.co_names), list(code.co_varnames), code.co_flags]


def stable_constant(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"frozenset({sorted(map(stable_constant, value))})"
    if isinstance(value, tuple):
        return f"({', '.join(map(stable_constant, value))})"
    return repr(value)


# --- from syntax trees ------------------------------------------------------------------------------------------------


def plain(node: Any) -> Plain:
    """A syntax tree without positions, docstrings and registration."""
    if isinstance(node, list):
        return [plain(part) for part in node]
    if not isinstance(node, ast.AST):
        return [type(node).__name__, stable_constant(node)]
    fields = []
    for name, value in ast.iter_fields(node):
        if name in LEFT_OUT or value is None:
            continue
        if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            value = without_docstring(value)
        elif name == "decorator_list":
            value = decorators_of(node)
        if value != []:
            fields.append([name, plain(value)])
    return [type(node).__name__, fields]


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    is_docstring = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return body[1:] if is_docstring else body


def annotated(cls: type) -> set[str]:
    """The fields of a dataclass or struct that its own body names."""
    fields = getattr(cls, "__struct_fields__", ())  # of msgspec's own base classes it is something else
    names = set(fields if isinstance(fields, tuple) else ())
    if dataclasses.is_dataclass(cls):
        names = {field.name for field in dataclasses.fields(cls)}
    return names & inspect.get_annotations(cls).keys()


def field_in(node: ast.ClassDef, name: str) -> ast.expr | None:
    """The expression after a field's annotation."""
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.target.id == name:
            return part.value
    return None


def without_fields(node: ast.ClassDef, fields: set[str]) -> ast.ClassDef:
    """Without its fields. Of what is annotated and no field, keep the value."""
    body: list[ast.stmt] = []
    for part in node.body:
        if not isinstance(part, ast.AnnAssign):
            body.append(part)
        elif part.value is not None and not (isinstance(part.target, ast.Name) and part.target.id in fields):
            body.append(ast.Assign([part.target], part.value))
    return ast.ClassDef(node.name, node.bases, node.keywords, body or [ast.Pass()], node.decorator_list)


def decorators_of(node: Any) -> list[ast.expr]:
    """All decorators but `@operator.register`, which gives the function's name, not what it does."""
    above: list[ast.expr] = getattr(node, "decorator_list", [])
    return [each for each in above if not (isinstance(each, ast.Attribute) and each.attr == "register")]


def chains_in(node: ast.AST) -> Iterator[Chain]:
    """Every name that is read, with the attributes after it: ("a",), ("a", "b", "c")."""
    for part in ast.walk(node):
        chain: list[str] = []
        while isinstance(part, ast.Attribute):
            chain.append(part.attr)
            part = part.value
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            yield (part.id, *reversed(chain))


def definitions_in(tree: ast.Module) -> dict[tuple[str, int], list[Definition]]:
    """The functions of a file, by name and first line, as in code objects."""
    found: dict[tuple[str, int], list[Definition]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            found.setdefault(("<lambda>", node.lineno), []).append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(above.lineno for above in node.decorator_list)])
            found.setdefault((node.name, first), []).append(node)
    return found


def holds(node: ast.Lambda, code: CodeType) -> bool:
    """Of several lambdas in one line, find the one whose body the code covers."""
    body = node.body
    return any(
        (line, column, end_line, end_column) == (body.lineno, body.col_offset, body.end_lineno, body.end_col_offset)
        for line, end_line, column, end_column in code.co_positions()
    )


def find_class(tree: ast.Module | None, cls: type) -> ast.ClassDef | None:
    """The class statement with this name, at this place in the file; of several, the last that has its annotations."""
    if tree is None:
        return None
    path = [part for part in cls.__qualname__.split(".") if part != "<locals>"]
    found: list[ast.AST] = [tree]
    for name in path:
        found = [node for above in found for node in within(above) if getattr(node, "name", None) == name]
    classes = [node for node in found if isinstance(node, ast.ClassDef)]
    named = list(inspect.get_annotations(cls))
    classes = [node for node in classes if annotations_in(node) == named] or classes
    return classes[-1] if classes else None


def annotations_in(node: ast.ClassDef) -> list[str]:
    parts = (part.target for part in node.body if isinstance(part, ast.AnnAssign))
    return [target.id for target in parts if isinstance(target, ast.Name)]


def within(node: ast.AST) -> Iterator[ast.AST]:
    """The definitions of one level: those in a body, also under an `if`, but not nested ones."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from within(child)


def makers(tree: ast.Module, name: str) -> Iterator[ast.stmt]:
    """The statements of a module that assign to this name."""
    for statement in top_level(tree.body):
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AugAssign | ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        if any(isinstance(part, ast.Name) and part.id == name for target in targets for part in ast.walk(target)):
            yield statement


def imports(tree: ast.Module, name: str, package: Any) -> Iterator[tuple[str, str]]:
    """From which module, and under which name, a module has imported this name."""
    for statement in top_level(tree.body):
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    above = str(package or "").split(".")
                    base = above[: len(above) - statement.level + 1] if statement.level else []
                    yield ".".join([*base, *([statement.module] if statement.module else [])]), alias.name


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from top_level(statement.body)
            yield from top_level(getattr(statement, "orelse", []))
            yield from top_level(getattr(statement, "finalbody", []))
            for handler in getattr(statement, "handlers", []):
                yield from top_level(handler.body)
