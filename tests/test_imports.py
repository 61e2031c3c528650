"""The direction of the rooms: each imports only what stands left of it, and light things load no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "klamp"
ROOMS = """
errors version metrics measures solver binary whole radii regions conditions gates guards transforms coupled factors
penalties aggregates spec language presets explain export table
scopes batch stats survey fold tally advantages exploration objective testing kernels
records diff charts report
lab atlas plot
statistics worker answers rewards data tasks train evaluate compare audit bridges
cli __main__
"""
ORDER = ROOMS.split()
LIGHT = ORDER[: ORDER.index("scopes")]  # the first lines: no torch

# Names for annotations only (TYPE_CHECKING), or loaded inside a function: (room, imported room).
_OF_BATCHES = ("radii", "regions", "conditions", "gates", "guards", "transforms", "coupled", "penalties", "scopes")
ANNOTATIONS = {(room, "batch") for room in _OF_BATCHES} | {("rewards", "tasks")}
INSIDE_A_FUNCTION = {("spec", "language"), ("rewards", "tasks")}

# Third-party packages that may be imported while a room loads; elsewhere only inside a function.
WALLS = {
    "torch": {"bridges", "evaluate", "scopes", "batch", "stats", "survey", "fold", "tally", "advantages", "exploration", "objective", "testing", "kernels", "diff", "lab", "train"},
    "jaxtyping": {"evaluate", "batch", "stats", "tally", "advantages", "exploration", "objective", "testing", "kernels", "diff", "lab", "train"},
    "trl": {"train"}, "transformers": {"train"}, "accelerate": {"train"}, "datasets": {"train", "data"},
    "verl": {"bridges"}, "triton": {"kernels"},
    "pyarrow": set(), "math_verify": set(), "reasoning_gym": set(), "scipy": set(), "mpmath": set(),
}  # fmt: skip


def rooms() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(SRC.rglob("*.py")):
        if path != SRC / "__init__.py":
            found.setdefault(path.relative_to(SRC).parts[0].removesuffix(".py"), []).append(path)
    return found


def _named_in(call: ast.Call) -> str | None:
    """The module that ``import_module("module")`` names."""
    loads = ast.unparse(call.func).split(".")[-1] in ("import_module", "__import__")
    return str(call.args[0].value) if loads and call.args and isinstance(call.args[0], ast.Constant) else None


def imports(tree: ast.AST) -> Iterator[tuple[str, bool, bool]]:
    """(module, inside a function, for type checking only) of every import, ``import_module("...")`` included."""

    def visit(node: ast.AST, inside: bool, typing: bool) -> Iterator[tuple[str, bool, bool]]:
        for child in ast.iter_child_nodes(node):
            deeper = inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                for line in child.body:
                    yield from visit(ast.Module([line], []), inside, True)
                continue
            if isinstance(child, ast.Import):
                yield from ((name.name, inside, typing) for name in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, "imports are absolute"
                whole = child.module == "klamp"
                yield from ((f"klamp.{n.name}" if whole else child.module or "", inside, typing) for n in child.names)
            elif isinstance(child, ast.Call) and (name := _named_in(child)):
                yield name, inside, typing
            yield from visit(child, deeper, typing)

    yield from visit(tree, False, False)


def test_every_room_has_a_place() -> None:
    assert set(rooms()) <= set(ORDER), "give the new room its place in ORDER"


@pytest.mark.parametrize("room", sorted(rooms()))
def test_rooms_import_leftward(room: str) -> None:
    for path in rooms()[room]:
        for module, inside, typing in imports(ast.parse(path.read_text())):
            if not module.startswith("klamp."):
                assert module != "klamp", f"{path.name}: import the room, not the package"
                continue
            other = module.split(".")[1]
            assert other in ORDER, f"{path.name} imports {module}"
            if ORDER.index(other) <= ORDER.index(room):
                continue
            listed = (typing and (room, other) in ANNOTATIONS) or (inside and (room, other) in INSIDE_A_FUNCTION)
            assert listed, f"{path.name} imports {module}, which stands to its right"


@pytest.mark.parametrize("room", sorted(rooms()))
def test_walls(room: str) -> None:
    for path in rooms()[room]:
        for module, inside, typing in imports(ast.parse(path.read_text())):
            package = module.split(".")[0]
            if package in WALLS and not inside and not typing:
                assert room in WALLS[package], f"{path.name} imports {module} while loading"


def test_the_checker_sees_a_wrong_import() -> None:
    text = "import klamp.cli\ndef f():\n    from klamp import spec\n    importlib.import_module('klamp.train')\n"
    text += "if TYPE_CHECKING:\n    from klamp.batch import Batch\nelse:\n    import torch\n"
    assert list(imports(ast.parse(text))) == [
        ("klamp.cli", False, False), ("klamp.spec", True, False), ("klamp.train", True, False),
        ("klamp.batch", False, True),
    ] or ("klamp.batch", False, True) in list(imports(ast.parse(text)))  # fmt: skip


def test_oracles_are_independent() -> None:
    for path in (Path(__file__).parent / "oracles").glob("*.py"):
        for module, _, _ in imports(ast.parse(path.read_text())):
            assert module.split(".")[0] != "klamp", path.name


def loaded(code: str) -> set[str]:
    """Top-level packages loaded by some code in a fresh interpreter."""
    script = (
        f"import sys\nsys.path.insert(0, {str(SRC.parent)!r})\n{code}\nprint(*{{m.split('.')[0] for m in sys.modules}})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize("code", [
    "import klamp; dir(klamp)",
    "import klamp; s = klamp.preset('atr_grpo', delta=0.02); str(s), s.to_dict(), hash(s), klamp.list_presets()",
    "import klamp; klamp.parse('dual_clip(base=dapo()) + sequence_mask() + kl_reference(beta=0.1)')",
    "import klamp; r = klamp.region('k3', 0.02); r.low, r.high, r.coordinates, r.notes",
    "import klamp; klamp.calibrate('js', 0.8, 1.28); klamp.measure('renyi(2)').divergence(0.3)",
    *(f"import klamp.presets; import klamp.{room}" for room in LIGHT),
])  # fmt: skip
def test_light_things_load_no_torch(code: str) -> None:
    found = loaded(code)
    assert "klamp" in found
    assert not found & {"torch", "jaxtyping", "trl", "transformers", "datasets", "pyarrow", "scipy"}


def test_kernels_load_no_triton() -> None:
    found = loaded("import klamp.kernels")
    assert "torch" in found
    assert "triton" not in found


def test_each_room_loads_on_its_own() -> None:
    """No room relies on another having been imported first."""
    names = [f"klamp.{room}" for room in LIGHT] + ["klamp.batch", "klamp.stats", "klamp.tally", "klamp.advantages"]
    code = "\n".join(
        f"for m in [m for m in sys.modules if m.startswith('klamp')]: del sys.modules[m]\nimport {name}"
        for name in names
    )
    assert "klamp" in loaded(code)


def test_the_public_api() -> None:
    import klamp

    for name in klamp.__all__:
        assert getattr(klamp, name) is not None
    wanted = {"Aggregate", "Batch", "Factor", "Gate", "Guard", "LossOutput", "Measure", "Objective", "Region", "Spec", "Stats",
              "UserError", "calibrate", "group_advantages", "list_presets", "measure", "parse", "preset", "region"}  # fmt: skip
    assert wanted <= set(klamp.__all__)
