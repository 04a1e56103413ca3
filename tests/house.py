"""The house rules: each takes one file and yields what is wrong in it, one line per finding."""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

LAYER = {
    "model": 0,
    "transfer": 1,
    "prefill": 2,
    "decode": 2,
    "serving": 3,
    "bench": 4,
    "tests": 4,
}
PRODUCT = ("model", "transfer", "prefill", "decode", "serving")
PURE_NAMES = frozenset(
    [
        "scheduler",
        "pages",
        "room",
        "router",
        "layout",
        "leases",
        "eplb",
        "admission",
        "prefix_cache",
        "prefix_index",
        "breaker",
        "balancer",
        "routes",
    ]
)
IMPURE_ROOTS = frozenset(
    [
        "jax",
        "jaxlib",
        "socket",
        "selectors",
        "ssl",
        "asyncio",
        "uvloop",
        "grpc",
        "time",
        "datetime",
        "threading",
        "subprocess",
        "http",
    ]
)
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
SHOWS_UNIX_TIME = frozenset(
    [
        "transfer/clock.py",
        "transfer/worker.py",  # epochs
        "serving/arrival.py",
        "serving/admin.py",
        "serving/chat_template.py",
    ]
)
# Calls whose string arguments name mesh axes.
AXIS_CALLS = frozenset(
    [
        "P",
        "PartitionSpec",
        "Mesh",
        "make_mesh",
        "psum",
        "pmean",
        "pmax",
        "pmin",
        "psum_scatter",
        "all_gather",
        "all_to_all",
        "ppermute",
        "axis_index",
        "axis_size",
        "pcast",
        "pvary",
    ]
)


@dataclass(frozen=True)
class Module:
    """One Python file: its path from the root, with slashes, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree."""
        return list(ast.walk(self.tree))

    @property
    def package(self) -> str:
        """First folder of the path; empty for a file at the root."""
        return self.path.split("/")[0] if "/" in self.path else ""

    @property
    def name(self) -> str:
        """Dotted name as imported."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """(line, dotted name) of every import at any depth, `from a import b` as a.b."""
        return list(_imports(self))


def _imports(module: Module) -> Iterator[tuple[int, str]]:
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.name.split(".")
                keep = len(parents) - node.level + module.path.endswith("/__init__.py")
                base = ".".join([*parents[:keep], *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and _dotted(node.func).endswith("import_module"):
            for arg in node.args[:1]:
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                    yield node.lineno, arg.value


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain; a call inside it counts as its function."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return _dotted(node.func)
    return ""


def _root(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


def imports_point_one_way(module: Module) -> Iterator[str]:
    """model <- transfer <- {prefill, decode} <- serving <- {bench, tests}."""
    own = LAYER.get(module.package)
    if own is None:
        return
    for line, name in module.imports:
        root = _root(name)
        if root == module.package or root not in LAYER:
            continue
        if module.package == "tests" or LAYER[root] < own:
            continue
        yield f"{module.path}:{line}: {module.package} imports {name}"


def only_launch_imports_both_roles(module: Module) -> Iterator[str]:
    """Only the composition root may know both prefill and decode."""
    if module.package == "tests" or module.path == "serving/launch.py":
        return
    roles = {_root(name) for _, name in module.imports} | {module.package}
    if {"prefill", "decode"} <= roles:
        yield f"{module.path}:1: knows both prefill and decode; only serving/launch.py may"


def pure_modules_do_no_io(module: Module) -> Iterator[str]:
    """State machines import no device, no socket, no event loop and no clock."""
    if module.package not in PRODUCT or module.name.split(".")[-1] not in PURE_NAMES:
        return
    for line, name in module.imports:
        if _root(name) in IMPURE_ROOTS or name.startswith("transfer.clock"):
            yield f"{module.path}:{line}: pure module imports {name}"


def only_the_clock_reads_time(module: Module) -> Iterator[str]:
    """transfer/clock.py is the only door to time."""
    if module.package not in PRODUCT or module.path == "transfer/clock.py":
        return
    for line, name in module.imports:
        if _root(name) == "time":
            yield f"{module.path}:{line}: imports {name}; take a transfer.clock.Clock"
    for node in module.nodes:
        if not isinstance(node, ast.Call):
            continue
        called = _dotted(node.func)
        if re.search(r"(^|\.)(datetime|date)\.(now|utcnow|today)$", called) or re.search(
            r"loop\.time$", called
        ):
            yield f"{module.path}:{node.lineno}: reads time by {called}"


def the_wall_clock_is_only_shown(module: Module) -> Iterator[str]:
    """Waits, measurements and messages use monotonic time: a wall clock may be set at any time."""
    if module.package not in PRODUCT or module.path in SHOWS_UNIX_TIME:
        return
    for node in module.nodes:
        if not isinstance(node, ast.Attribute):
            continue
        read = _dotted(node)
        if read.lower().endswith("clock.now_s"):
            yield f"{module.path}:{node.lineno}: {read} is for people; take monotonic_s"


def mesh_axes_are_named_once(module: Module) -> Iterator[str]:
    """Only model/sharding.py writes the name of a mesh axis."""
    if module.package not in (*PRODUCT, "bench") or module.path == "model/sharding.py":
        return
    for node in module.nodes:
        if not isinstance(node, ast.Call) or _dotted(node.func).split(".")[-1] not in AXIS_CALLS:
            continue
        for arg in (*node.args, *(keyword.value for keyword in node.keywords)):
            for leaf in ast.walk(arg):
                if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str):
                    yield f"{module.path}:{leaf.lineno}: names mesh axis {leaf.value!r}"


def no_type_checking_blocks(module: Module) -> Iterator[str]:
    """An import cycle is removed, not hidden."""
    for node in module.nodes:
        if (isinstance(node, ast.Name) and node.id == "TYPE_CHECKING") or (
            isinstance(node, ast.Attribute) and node.attr == "TYPE_CHECKING"
        ):
            yield f"{module.path}:{node.lineno}: TYPE_CHECKING"


def files_state_their_responsibility(module: Module) -> Iterator[str]:
    """The first statement is a docstring and its first line a sentence."""
    docstring = ast.get_docstring(module.tree)
    if not docstring or not docstring.splitlines()[0].strip():
        yield f"{module.path}:1: does not start with a docstring"


def files_and_functions_fit_a_sitting(module: Module) -> Iterator[str]:
    """Bounds on lines; kernels may have longer functions."""
    lines = module.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{module.path}:1: {lines} lines, at most {MAX_FILE_LINES}"
    if module.path.startswith("model/kernels/"):
        return
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield (
                    f"{module.path}:{node.lineno}: {node.name} has {length} lines, "
                    f"at most {MAX_FUNCTION_LINES}"
                )


def no_error_is_swallowed(module: Module) -> Iterator[str]:
    """No bare except, and no catch-all that does nothing."""
    for node in module.nodes:
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            yield f"{module.path}:{node.lineno}: bare except"
        elif _dotted(node.type) in ("Exception", "BaseException") and all(
            isinstance(statement, ast.Pass | ast.Continue) for statement in node.body
        ):
            yield f"{module.path}:{node.lineno}: swallows {_dotted(node.type)}"


def only_public_jax(module: Module) -> Iterator[str]:
    """Nothing of jax that may move without notice."""
    used = list(module.imports)
    used += [
        (node.lineno, _dotted(node)) for node in module.nodes if isinstance(node, ast.Attribute)
    ]
    for line, name in sorted(set(used)):
        parts = name.split(".")
        if parts[0] not in ("jax", "jaxlib"):
            continue
        private = any(part.startswith("_") and not part.startswith("__") for part in parts)
        if private or parts[0] == "jaxlib" or parts[1:2] == ["interpreters"]:
            yield f"{module.path}:{line}: {name} is private"


def only_metrics_knows_the_metrics_library(module: Module) -> Iterator[str]:
    """prometheus_client stays behind serving/metrics.py."""
    if module.path == "serving/metrics.py" or module.package == "tests":
        return
    for line, name in module.imports:
        if _root(name) == "prometheus_client":
            yield f"{module.path}:{line}: imports {name}"


def nothing_is_pickled_and_no_path_is_edited(module: Module) -> Iterator[str]:
    """Messages are typed structs; packages are installed."""
    for line, name in module.imports:
        if _root(name) in ("pickle", "cloudpickle", "dill", "marshal", "shelve"):
            yield f"{module.path}:{line}: imports {name}"
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and _dotted(node) == "sys.path":
            yield f"{module.path}:{node.lineno}: touches sys.path"


MODULE_RULES: tuple[Callable[[Module], Iterator[str]], ...] = (
    imports_point_one_way,
    only_launch_imports_both_roles,
    pure_modules_do_no_io,
    only_the_clock_reads_time,
    the_wall_clock_is_only_shown,
    mesh_axes_are_named_once,
    no_type_checking_blocks,
    files_state_their_responsibility,
    files_and_functions_fit_a_sitting,
    no_error_is_swallowed,
    only_public_jax,
    only_metrics_knows_the_metrics_library,
    nothing_is_pickled_and_no_path_is_edited,
)


def pure_modules_reach_no_jax(modules: list[Module]) -> Iterator[str]:
    """No chain of our imports leads from a pure module to jax."""
    by_name = {module.name: module for module in modules}

    def owners(name: str) -> Iterator[str]:
        """Our modules that importing `name` runs."""
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            if ".".join(parts[:end]) in by_name:
                yield ".".join(parts[:end])

    for module in modules:
        if module.package not in PRODUCT or module.name.split(".")[-1] not in PURE_NAMES:
            continue
        todo, seen = [module.name], {module.name}
        while todo:
            current = todo.pop()
            for line, name in by_name[current].imports:
                if _root(name) in ("jax", "jaxlib"):
                    yield f"{module.path}:1: reaches {name} by {by_name[current].path}:{line}"
                for owner in owners(name):
                    if owner not in seen:
                        seen.add(owner)
                        todo.append(owner)


# What belongs to one machine, to one tracker, or to how the work was organised.
FORBIDDEN_TEXT = (
    (
        "machine path",
        re.compile(r"(?<![\w./-])/(work|root|home/\w+|Users/\w+|opt/wheels)(?![\w-])"),
    ),
    ("machine path", re.compile(r"\.\./shared\b|/tmp/kv\b")),
    ("registry address", re.compile(r"pypi\.org|pythonhosted|--(extra-)?index-url[ =]\S*http")),
    ("number of an issue", re.compile(r"(?i)\b(issues?|pull requests?|PRs?|GH)[ -]?#?\d{2,}\b")),
    ("number of an issue", re.compile(r"(?<![&\w\"'])#\d{2,}\b|\b[a-z][\w-]*#\d{3,}\b")),
    (
        "how the work was organised",
        re.compile(
            r"(?i)\b(sub-?agents?|ai assistants?|coding assistants?|claude|copilot|"
            r"(this|earlier|previous|last|next|other) sessions?|helper sessions?)\b"
        ),
    ),
    ("unfinished work", re.compile(r"\b(TODO|FIXME|XXX)\b")),
)


def text_names_no_machine_and_no_ticket(path: str, text: str) -> Iterator[str]:
    """Tracked text contains nothing that only the author's machine or tracker can explain."""
    for number, line in enumerate(text.splitlines(), 1):
        for what, pattern in FORBIDDEN_TEXT:
            found = pattern.search(line)
            if found:
                yield f"{path}:{number}: {what}: {found.group()!r}"


_FENCE = re.compile(r"^\s*```.*?$(.*?)^\s*```", re.MULTILINE | re.DOTALL)
_TREE_LINE = re.compile(r"^([\s│├└─|`+-]*)([\w.<>-][\w./<>-]*)")
_MENTION = re.compile(
    r"`((?:model|transfer|prefill|decode|serving|bench|tests|scripts|docs)/[\w./-]*)`"
)


def readme_names_only_what_exists(root: Path, text: str) -> Iterator[str]:
    """Every folder or file of a drawn tree, and every path in backticks, exists."""
    for block in _FENCE.findall(text):
        lines = [line for line in block.splitlines() if line.strip()]
        found = [match for match in map(_TREE_LINE.match, lines) if match]
        if sum(match.group(2).endswith("/") for match in found) < 3:
            continue
        parents: list[tuple[int, Path]] = []
        for match in found:
            indent, token = len(match.group(1)), match.group(2)
            while parents and parents[-1][0] >= indent:
                parents.pop()
            path = (parents[-1][1] if parents else root) / token
            if token.endswith("/"):
                if not path.is_dir():
                    yield f"README.md: no folder {path.relative_to(root)}/"
                parents.append((indent, path))
            elif re.search(r"\.(py|toml|md|lock|txt|jsonl?)$", token) and not path.exists():
                yield f"README.md: no file {path.relative_to(root)}"
    for mention in _MENTION.findall(text):
        if not (root / mention).exists() and not (root / f"{mention}.py").exists():
            yield f"README.md: no {mention}"
