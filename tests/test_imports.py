"""Nothing imports itself, by whatever detour: imports within functions and for type checkers only count as well."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from springtide.rpc.generate import REPOSITORY

PACKAGES = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]


def modules() -> dict[str, Path]:
    """The file of each module, by its dotted name; a package's is its `__init__`."""
    found = {}
    for path in (path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what may be modules, however deep in the file they are imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "imports are absolute"
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def with_packages(name: str) -> Iterator[str]:
    """The module, and the packages around it, whose `__init__` runs before it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def arrows() -> dict[str, set[str]]:
    """What each module imports. The packages around it are left out: it is a part of them."""
    files = modules()
    graph = {}
    for module, path in files.items():
        targets = {name for target in imported(ast.parse(path.read_text())) for name in with_packages(target)}
        graph[module] = (targets & files.keys()) - set(with_packages(module))
    return graph


def circles(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one (Tarjan, SIAM J. Comput. 1, 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        path.append(node)
        for target in sorted(graph[node]):
            if target not in number:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in path:
                lowest[node] = min(lowest[node], number[target])
        if lowest[node] == number[node]:
            component = path[path.index(node) :]
            del path[path.index(node) :]
            if len(component) > 1:
                found.append(component)

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "c"}}) == [["b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_a_client_loads_little() -> None:
    heavy = ["numpy", "grpc", "google.protobuf", "torch"]
    code = f"import sys, springtide.client; print([name for name in {heavy} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_no_module_imports_itself_by_a_detour() -> None:
    assert circles(arrows()) == []
