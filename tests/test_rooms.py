"""The rules of the rooms, read from the source: who may import whom, which libraries stay in which file, and that
importing has no side effects.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nanoinfer"
FILES = sorted(PACKAGE.rglob("*.py"))

# Lowest first. A room may import its own level's room and lower levels. The roots: what stands beside the rooms.
VOCABULARY = {"config", "sampling_params", "outputs", "step", "version"}
LEVELS: list[set[str]] = [
    VOCABULARY,
    {"kernels", "distributed"},
    {"attention"},
    {"layers"},
    {"models"},
    {"worker"},
    {"executor"},
    {"engine"},
    {"llm", "async_llm"},
]
# Above all of these; they may use any of them.
TOP = {"", "demo", "bench", "server", "cli", "__main__", "entrypoints"}
# Tables of data are as long as the data is.
EXEMPT_FROM_LENGTH = "demo"


def room(path: Path) -> str:
    """The first part of the module's name below `nanoinfer`; "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def level(name: str) -> int:
    for index, rooms in enumerate(LEVELS):
        if name in rooms:
            return index
    assert name in TOP, f"nanoinfer/{name} is a room that the order does not know"
    return len(LEVELS)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


class Import:
    def __init__(self, module: str, line: int, *, deferred: bool, for_types: bool) -> None:
        self.module, self.line, self.deferred, self.for_types = module, line, deferred, for_types


def imports(path: Path) -> Iterator[Import]:
    """Every import of a file: also those inside functions (deferred) and under TYPE_CHECKING (for_types).

    `from a import b` is given as `a` and as `a.b`, since b may be a module.
    """

    def walk(node: ast.AST, deferred: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, deferred=deferred, for_types=for_types)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield Import(node.module or "", node.lineno, deferred=deferred, for_types=for_types)
            for alias in node.names:
                yield Import(f"{node.module}.{alias.name}", node.lineno, deferred=deferred, for_types=for_types)
        for child in ast.iter_child_nodes(node):
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and child in node.body
            yield from walk(child, deferred or inside, for_types or guarded)

    return walk(tree(path), False, False)


def of_ours(module: str) -> str | None:
    """The room of a module of ours that is imported, "" for the package itself, or None if it is another's."""
    parts = module.split(".")
    if parts[0] != "nanoinfer":
        return None
    if len(parts) > 1 and ((PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file()):
        return parts[1]
    return ""


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 20
    assert {room(path) for path in FILES} >= {"config", "kernels", "attention", "layers", "models", "worker", "engine"}
    assert any(i.for_types for path in FILES for i in imports(path)) and any(
        i.deferred for path in FILES for i in imports(path)
    ), "the reader of imports finds no guarded ones"


def test_imports_go_down_the_list_of_rooms_only() -> None:
    wrong = []
    for path in FILES:
        for found in imports(path):
            target, own = of_ours(found.module), room(path)
            if target is None or level(own) == len(LEVELS):
                continue
            same_room = target == own or (target in VOCABULARY and own in VOCABULARY)
            # A name out of the package itself (`from nanoinfer import LLM`) is for those above all rooms.
            if target == "" or not (same_room or level(target) < level(own)):
                wrong.append(f"{where(path, found.line)}: {own} imports {found.module}")
    assert not wrong, "\n".join(wrong)


def test_the_executor_imports_what_has_torch_only_where_it_starts_a_rank() -> None:
    """`worker_main` is what a rank's own process runs."""
    for path in FILES:
        if room(path) in ("executor", "engine") and path.name != "worker_main.py":
            for found in imports(path):
                target = of_ours(found.module)
                if target in {"worker", "models", "layers", "attention", "kernels", "distributed"}:
                    assert found.deferred or found.for_types, f"{where(path, found.line)} imports {found.module}"


def outer_package(module: str) -> str:
    return module.split(".")[0]


@pytest.mark.parametrize(
    ("library", "places"),
    [
        ("triton", ["kernels/triton/", "attention/triton.py"]),
        ("flash_attn", ["attention/flash_attn.py"]),
        ("torch.distributed", ["distributed/"]),
    ],
)
def test_a_library_stays_in_its_place(library: str, places: list[str]) -> None:
    for path in FILES:
        inside = path.relative_to(PACKAGE).as_posix()
        if any(inside.startswith(place) for place in places):
            continue
        for found in imports(path):
            used = found.module == library or found.module.startswith(f"{library}.")
            assert not used, f"{where(path, found.line)} imports {library}"
        for node in ast.walk(tree(path)):
            if library == "torch.distributed" and isinstance(node, ast.Attribute) and node.attr == "distributed":
                is_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
                assert not is_torch, f"{where(path, node.lineno)} uses torch.distributed"


def test_vocabulary_engine_and_executor_do_not_import_torch_at_the_top() -> None:
    for path in FILES:
        if room(path) in VOCABULARY | {"engine", "executor", "llm", ""} and path.name != "worker_main.py":
            for found in imports(path):
                if outer_package(found.module) in ("torch", "transformers", "safetensors"):
                    assert found.deferred or found.for_types, f"{where(path, found.line)} imports {found.module}"


def test_there_is_no_global_statement_and_no_context_to_look_things_up_in() -> None:
    for path in FILES:
        for node in ast.walk(tree(path)):
            assert not isinstance(node, (ast.Global,)), f"{where(path, node.lineno)}: a global statement"
            if isinstance(node, ast.FunctionDef):
                assert node.name not in ("set_context", "get_context"), where(path, node.lineno)


def test_environment_variables_are_for_other_libraries() -> None:
    """Every switch of ours is a field of the configuration."""
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith("NANOINFER"), where(path, node.lineno)


def test_there_is_no_room_for_everything_and_none_is_empty() -> None:
    for path in PACKAGE.rglob("*"):
        assert path.name.removesuffix(".py") not in ("utils", "util", "helpers", "common", "misc"), path
    for directory in (p for p in PACKAGE.rglob("*") if p.is_dir() and any(p.glob("*.py"))):
        names = [p.name for p in directory.glob("*.py") if p.name != "__init__.py"]
        inner = [p for p in directory.iterdir() if p.is_dir() and any(p.glob("*.py"))]
        assert names or inner, f"{directory} has nothing in it"


def code_lines(path: Path) -> int:
    """Lines that are neither blank, nor comment, nor docstring."""
    skipped: set[int] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                skipped |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = path.read_text(encoding="utf-8").splitlines()
    return sum(
        1 for i, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#") and i not in skipped
    )


@pytest.mark.parametrize(
    "path", [p for p in FILES if room(p) != EXEMPT_FROM_LENGTH], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_files_and_functions_stay_short_and_open_with_what_they_are(path: Path) -> None:
    assert ast.get_docstring(tree(path)), f"{path} does not say what it is"
    assert code_lines(path) <= 400
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60, f"{where(path, node.lineno)}: {node.name} has {length} lines"


def test_nobody_tokenizes_while_holding_the_gil() -> None:
    """`Tokenizer.encode` of tokenizers does, for as long as the text is long; its `encode_batch_fast` does not."""
    found = [
        where(path, node.lineno)
        for path in FILES
        if room(path) in ("engine", "entrypoints", "async_llm")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "encode"
        # str.encode takes the name of an encoding, if anything.
        if node.args and not isinstance(node.args[0], ast.Constant)
    ]
    assert not found


def test_every_signature_is_typed() -> None:
    missing = []
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                untyped = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
                if untyped or (node.returns is None):
                    missing.append(f"{where(path, node.lineno)}: {node.name} {untyped}")
    assert not missing, "\n".join(missing)


# --- In a process of its own -------------------------------------------------------------------------------------


def run_python(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module",
    ["nanoinfer", "nanoinfer.engine.llm_engine", "nanoinfer.config", "nanoinfer.step", "nanoinfer.executor.uniproc",
     "nanoinfer.executor.base", "nanoinfer.engine.scheduler"],
)  # fmt: skip
def test_importing_the_engine_loads_no_torch(module: str) -> None:
    loaded = run_python(
        f"import sys, {module}\n"
        "print([m for m in ('torch', 'transformers', 'triton', 'flash_attn', 'safetensors') if m in sys.modules])"
    )
    assert loaded == "[]"


def test_importing_everything_changes_nothing_of_torch_and_needs_no_gpu_library() -> None:
    """Defaults of dtype, device, threads, gradients and seeds stay; triton and flash_attn are not there."""
    modules = [
        "nanoinfer." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if room(path) not in TOP and path.name not in ("triton.py", "flash_attn.py")
        and "triton" not in path.relative_to(PACKAGE).parts and path.name != "__init__.py"
    ]  # fmt: skip
    assert len(modules) > 20
    source = f"""
import importlib, os, random, sys
for name in ("triton", "flash_attn"):
    sys.modules[name] = None  # importing it raises
import torch, numpy, warnings, signal, logging
def state():
    return (
        torch.get_default_dtype(), torch.get_num_threads(), torch.get_num_interop_threads(), torch.is_grad_enabled(),
        torch.get_default_device(), torch.initial_seed(), random.getstate(), numpy.random.get_state()[1].tolist(),
        torch.get_float32_matmul_precision(), dict(os.environ), signal.getsignal(signal.SIGINT),
        logging.getLogger().handlers[:], logging.getLogger().level, torch.cuda.is_initialized(),
    )
before = state()
import nanoinfer
for name in {modules!r}:
    importlib.import_module(name)
assert state() == before
assert not torch.distributed.is_initialized()
print("same")
"""
    assert run_python(source) == "same"


def test_the_public_names_are_there() -> None:
    names = run_python(
        "import nanoinfer; print(sorted(nanoinfer.__all__)); nanoinfer.LLM; print(nanoinfer.__version__)"
    )
    assert "'LLM'" in names and "'SamplingParams'" in names and "'RequestOutput'" in names
    assert (PACKAGE / "py.typed").is_file()
