# SPDX-License-Identifier: Apache-2.0
"""The house of the README holds: imports run down only, nothing is unpickled, every setting is explained."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache.settings import Settings
from repair.registry import offered

ROOT = Path(__file__).resolve().parent.parent
# A package imports from floors below its own; neighbours on one floor do not import each other.
FLOOR = {
    "cachemend": 6,
    "cluster": 5,
    "serve_app": 4,
    "pipelines": 4,
    "repair": 3,
    "engine": 3,
    "retrieval": 2,
    "kvcache": 1,
}
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"torch.load", "torch.save", "pandas.read_pickle", "pd.read_pickle"}

PRODUCT_FILES = sorted(path for package in FLOOR for path in (ROOT / package).rglob("*.py"))
ALL_FILES = sorted(
    path for folder in (*FLOOR, "tests", "examples", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")
)


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every absolute module name in an import statement, wherever it stands, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno


def upward_imports(package: str, source: str) -> list[str]:
    found = []
    for module, line in imported_modules(ast.parse(source)):
        other = module.split(".")[0]
        if other in FLOOR and other != package and FLOOR[other] >= FLOOR[package]:
            found.append(f"line {line} imports {module}")
    return found


def unsafe_loading(source: str) -> list[str]:
    tree = ast.parse(source)
    found = [
        f"line {line} imports {name}" for name, line in imported_modules(tree) if name.split(".")[0] in UNSAFE_MODULES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in UNSAFE_CALLS:
                found.append(f"line {node.lineno} calls {ast.unparse(node.func)}")
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    found.append(f"line {node.lineno} allows pickle")
    return found


def test_every_package_has_a_floor() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"}
    assert packages == set(FLOOR)


@pytest.mark.parametrize("path", PRODUCT_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_down_only(path: Path) -> None:
    assert upward_imports(path.relative_to(ROOT).parts[0], path.read_text()) == []


@pytest.mark.parametrize("path", PRODUCT_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled(path: Path) -> None:
    assert unsafe_loading(path.read_text()) == []


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("kvcache", "from retrieval.types import RetrievedChunk"),
        ("serve_app", "import pipelines.ingest"),
        ("pipelines", "from serve_app import app"),
        ("repair", "from engine.engine import Engine"),
        ("engine", "def late():\n    import repair.base"),
        ("retrieval", "from cachemend import ui"),
    ],
)
def test_the_import_check_sees_violations(package: str, line: str) -> None:
    assert upward_imports(package, line)


@pytest.mark.parametrize(
    "line", ["import pickle", "x = torch.load(f)", "np.load(f, allow_pickle=True)", "from joblib import load"]
)
def test_the_pickle_check_sees_violations(line: str) -> None:
    assert unsafe_loading(line)


def test_every_python_file_names_its_licence() -> None:
    missing = [
        str(path.relative_to(ROOT))
        for path in ALL_FILES
        if path.read_text().splitlines()[:1] != ["# SPDX-License-Identifier: Apache-2.0"]
    ]
    assert missing == []


def test_every_setting_has_a_default_and_a_sentence() -> None:
    tree = ast.parse((ROOT / "kvcache" / "settings.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    sections = {name for name, node in classes.items() if [ast.unparse(base) for base in node.bases] == ["Section"]}
    faults = []
    for name in [*sorted(sections), "Settings"]:
        if not ast.get_docstring(classes[name]):
            faults.append(f"{name} has no docstring")
        body = classes[name].body
        for node, following in zip(body, [*body[1:], None], strict=True):
            if not isinstance(node, ast.AnnAssign):
                continue
            field = f"{name}.{ast.unparse(node.target)}"
            if node.value is None:
                faults.append(f"{field} has no default")
            explained = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            # A section is explained by its class.
            if not explained and ast.unparse(node.annotation) not in sections:
                faults.append(f"{field} has no sentence")
    assert faults == []


def test_the_defaults_are_valid_without_any_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings().repair.default in offered(Settings())


DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def relative_links(document: Path) -> list[Path]:
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text())
    return [(document.parent / target).resolve() for target in targets if "://" not in target]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    assert [str(target) for target in relative_links(document) if not target.exists()] == []


def test_the_readme_links_to_every_repair_method() -> None:
    from repair.registry import REPAIRERS

    linked = set(relative_links(ROOT / "README.md"))
    missing = [name for name, cls in REPAIRERS.items() if Path(inspect.getfile(cls)).resolve() not in linked]
    assert missing == []
