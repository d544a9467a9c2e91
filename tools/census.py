"""Counts that show how the package reads: `python -m tools.census [--json]`.

Prints modules, lines, the longest function and duplicates; exits 1 if a public class name is defined in two modules
or if modules import each other in a cycle at load time. Sizes are printed for information only.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = (".py", ".c", ".h", ".cu", ".cuh")


@dataclass(frozen=True, slots=True)
class Census:
    modules: int  # Python files, without those `__init__.py` that hold a docstring only
    packages: int
    lines: int  # of Python
    native_lines: int  # of C and CUDA
    test_lines: int
    functions: int
    longest_function: str  # path:line name (lines)
    function_lines_p95: int
    public_class_names_defined_twice: dict[str, list[str]]
    import_cycles: list[list[str]]

    @property
    def faults(self) -> bool:
        return bool(self.public_class_names_defined_twice or self.import_cycles)


def take(root: Path = ROOT) -> Census:
    files = sorted((root / "onedraw").rglob("*.py"))
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    functions = sorted(
        (node.end_lineno - node.lineno + 1, f"{file.relative_to(root)}:{node.lineno} {node.name}")
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    )
    longest, place = functions[-1]
    return Census(
        modules=sum(len(tree.body) > 1 or file.name != "__init__.py" for file, tree in trees.items()),
        packages=sum(file.name == "__init__.py" for file in files),
        lines=_lines(files),
        native_lines=_lines(file for file in (root / "onedraw").rglob("*.*") if file.suffix in SOURCES[1:]),
        test_lines=_lines((root / "tests").rglob("*.py")),
        functions=len(functions),
        longest_function=f"{place} ({longest})",
        function_lines_p95=functions[int(0.95 * (len(functions) - 1))][0],
        public_class_names_defined_twice=class_names_defined_twice(trees, root),
        import_cycles=cycles(load_time_imports(trees, root)),
    )


def class_names_defined_twice(trees: Mapping[Path, ast.Module], root: Path) -> dict[str, list[str]]:
    """Public top-level classes by name, where more than one module defines the name."""
    defined: dict[str, list[str]] = defaultdict(list)
    for file, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].append(file.relative_to(root).as_posix())
    return {name: places for name, places in sorted(defined.items()) if len(places) > 1}


def load_time_imports(trees: Mapping[Path, ast.Module], root: Path) -> dict[str, set[str]]:
    """Module -> modules of the package that it imports when it is loaded: top-level statements, without TYPE_CHECKING blocks."""
    names = {_module(file, root): tree for file, tree in trees.items()}
    imports: dict[str, set[str]] = {name: set() for name in names}
    for name, tree in names.items():
        for node in _load_time_statements(tree.body):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                # `from package import module` loads the module; `from module import name` loads the module alone.
                targets = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            imports[name].update(target for target in targets if target in names and target != name)
    return imports


def _load_time_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _load_time_statements(node.orelse)
        elif isinstance(node, ast.If | ast.Try):
            yield from _load_time_statements([*node.body, *node.orelse])
        else:
            yield node


def cycles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components with more than one module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(imports[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            component = [stack.pop()]
            while component[-1] != name:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for name in sorted(imports):
        if name not in index:
            visit(name)
    return found


def _module(file: Path, root: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _lines(files: Iterator[Path] | list[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object")
    census = take()
    if parser.parse_args().json:
        print(json.dumps(asdict(census), indent=2))
        return census.faults
    for name, value in asdict(census).items():
        print(f"{name.replace('_', ' '):34} {value if not isinstance(value, dict | list) else len(value)}")
    for name, places in census.public_class_names_defined_twice.items():
        print(f"error: class {name} is defined in {' and '.join(places)}; rename one")
    for cycle in census.import_cycles:
        print(f"error: these modules import each other: {', '.join(cycle)}")
    return census.faults


if __name__ == "__main__":
    sys.exit(main())
