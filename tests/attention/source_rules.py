"""Rules over sources: what a launcher may not know, which numbers an engine may not hold."""

import ast
from collections.abc import Iterable

from minuet.attention.capability import Accepted, Capability

_FORBIDDEN_MODULES = ("minuet.env", "minuet.attention.dispatch", "minuet.attention.capability")
_BACKENDS = "minuet.attention.backends"
_LIMITED = (
    "page_size",
    "block_size",
    "head_dim",
    "group",
    "query_len",
    "top_blocks",
    "parts",
    "tile",
)


def imported(tree: ast.AST) -> list[str]:
    """Every module or member that is imported, dotted; also through ``import_module``."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            names += [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
    return names


def launcher_faults(tree: ast.AST, own_backend: str) -> list[str]:
    """What a launcher refers to and must not: another backend, the environment, a decision."""
    faults = []
    for name in imported(tree):
        inside_own = (name + ".").startswith(f"{_BACKENDS}.{own_backend}.")
        if name.startswith(_BACKENDS) and not inside_own:
            faults.append(name)
        if any((name + ".").startswith(f"{module}.") for module in _FORBIDDEN_MODULES):
            faults.append(name)
        if name in ("os.environ", "os.getenv"):
            faults.append(name)
    used = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return faults + [name for name in used if name in ("os.environ", "os.getenv")]


def numbers_of(kernels: Iterable[Capability]) -> set[int]:
    """Every number above 1 that a kernel's table states as a limit."""
    found: set[int] = set()
    for kernel in kernels:
        values = (getattr(kernel, name) for name in kernel.__dataclass_fields__)
        for value in values:
            if isinstance(value, Accepted):
                found |= {*value.values, value.high or 0}
            elif isinstance(value, int):
                found.add(value)
    return {number for number in found if number > 1}


def limit_faults(tree: ast.AST, limits: set[int]) -> list[str]:
    """Places where a limited fact is compared with, bounded by or set to a kernel's number."""
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) or (
            isinstance(node, ast.Call) and ast.unparse(node.func) in ("min", "max")
        ):
            suspects = [node]
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.keyword):
            target = node.arg if isinstance(node, ast.keyword) else ast.unparse(node).split("=")[0]
            plain = isinstance(node.value, ast.Constant | ast.Tuple)
            suspects = [node] if plain and _is_limited(target or "") else []
        elif isinstance(node, ast.arguments):
            with_default = node.args[len(node.args) - len(node.defaults) :]
            pairs = zip(with_default, node.defaults, strict=True)
            suspects = [default for arg, default in pairs if _is_limited(arg.arg)]
            faults += [ast.unparse(s) for s in suspects if _holds(s, limits)]
            continue
        else:
            continue
        faults += [
            ast.unparse(s) for s in suspects if _is_limited(ast.unparse(s)) and _holds(s, limits)
        ]
    return faults


def _is_limited(text: str) -> bool:
    return any(word in text.lower() for word in _LIMITED)


def _holds(node: ast.AST, limits: set[int]) -> bool:
    return any(
        isinstance(n, ast.Constant) and type(n.value) is int and n.value in limits
        for n in ast.walk(node)
    )
