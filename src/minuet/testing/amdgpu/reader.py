"""Tokens, types and constants of textual LLVM IR: the ground that the parser stands on."""

import re
import struct

import numpy as np

from minuet.testing.amdgpu.ir import Global, Operand
from minuet.testing.amdgpu.state import SimulationError
from minuet.testing.amdgpu.types import (
    Arr,
    Float,
    Int,
    Ptr,
    Struct,
    Type,
    Vec,
    Void,
    dtype_of,
    size_of,
)

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>c?"(?:[^"\\]|\\.)*")
  | (?P<name>[%@](?:"[^"]*"|[-\w.$]+))
  | (?P<meta>![\w.]*)
  | (?P<attr>\#\d+)
  | (?P<number>f?0x[KLMHR]?[0-9A-Fa-f]+|[+-]?\d+\.\d*(?:[eE][+-]?\d+)?|[+-]?inf|[+-]?nan|-?\d+)
  | (?P<word>[A-Za-z_][\w.]*)
  | (?P<punct>\.\.\.|[()<>\[\]{},=*:|])
    )""",
    re.X,
)

FLAGS = frozenset(
    [
        "nuw",
        "nsw",
        "exact",
        "disjoint",
        "nneg",
        "samesign",
        "inbounds",
        "nusw",
        "fast",
        "nnan",
        "ninf",
        "nsz",
        "arcp",
        "contract",
        "afn",
        "reassoc",
        "tail",
        "musttail",
        "notail",
        "volatile",
        "weak",
    ]
)
_PARAM_WORDS = frozenset(
    [
        "noundef",
        "inreg",
        "nocapture",
        "nonnull",
        "readonly",
        "readnone",
        "writeonly",
        "signext",
        "zeroext",
        "noalias",
        "returned",
        "immarg",
        "nofree",
        "noinline",
        "captures",
        "dead_on_return",
    ]
)


class Reader:
    """One line at a time as tokens; subclasses read statements with it."""

    def __init__(self) -> None:
        self.globals: dict[str, Global] = {}
        self.tokens: list[tuple[str, str]] = []
        self.at = 0
        self.line = ""

    # --- tokens ----------------------------------------------------------------------------------

    def _tokenize(self, line: str) -> None:
        self.line, self.at, self.tokens = line.strip(), 0, []
        position = 0
        while position < len(line):
            match = _TOKEN.match(line, position)
            if match is None:
                if not line[position:].strip() or line[position:].lstrip().startswith(";"):
                    break
                raise SimulationError(f"cannot read {line[position:]!r} in: {line.strip()}")
            kind = match.lastgroup
            assert kind is not None
            self.tokens.append((kind, match.group(kind)))
            position = match.end()
        self.tokens.append(("end", ""))

    def _peek(self, ahead: int = 0) -> tuple[str, str]:
        return self.tokens[min(self.at + ahead, len(self.tokens) - 1)]

    def _next(self) -> tuple[str, str]:
        token = self._peek()
        self.at += 1
        return token

    def _accept(self, text: str) -> bool:
        if self._peek()[1] == text and self._peek()[0] != "string":
            self.at += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise SimulationError(f"expected {text!r}, got {self._peek()[1]!r} in: {self.line}")

    def _skip_group(self) -> None:
        """From an opening parenthesis past the closing one."""
        depth = 0
        while True:
            text = self._next()[1]
            depth += text == "("
            depth -= text == ")"
            if depth == 0:
                return

    def _skip_param_attributes(self) -> None:
        while True:
            kind, text = self._peek()
            if kind != "word":
                return
            if text in _PARAM_WORDS:
                self._next()
                if self._peek()[1] == "(":
                    self._skip_group()
            elif text in ("align", "dereferenceable", "range", "nofpclass", "byref", "initializes"):
                self._next()
                if self._peek()[1] == "(":
                    self._skip_group()
                else:
                    self._next()
            else:
                return

    # --- types and constants ---------------------------------------------------------------------

    def _type(self) -> Type:
        kind, text = self._next()
        if text == "void":
            return Void()
        if kind == "word" and re.fullmatch(r"i\d+", text):
            return Int(int(text[1:]))
        if text in ("half", "bfloat", "float", "double"):
            return Float(text)
        if text == "ptr":
            space = 0
            if self._accept("addrspace"):
                self._expect("(")
                space = int(self._next()[1])
                self._expect(")")
            return Ptr(space)
        if text in ("<", "["):
            if text == "<" and self._peek()[1] == "{":
                inner = self._type()
                self._expect(">")
                return inner
            count = int(self._next()[1])
            if self._next()[1] != "x":
                raise SimulationError(f"expected x in: {self.line}")
            element = self._type()
            self._expect(">" if text == "<" else "]")
            return Vec(count, element) if text == "<" else Arr(count, element)
        if text == "{":
            elements = []
            while not self._accept("}"):
                elements.append(self._type())
                self._accept(",")
            return Struct(tuple(elements))
        raise SimulationError(f"type {text!r} is not modelled in: {self.line}")

    def _operand(self, kind: Type) -> Operand:
        what, text = self._peek()
        if what == "name" and text.startswith("%"):
            self._next()
            return text
        return self._constant(kind)

    def _constant(self, kind: Type) -> Operand:
        what, text = self._next()
        if text in ("undef", "poison"):
            return poison(kind)
        if text in ("zeroinitializer", "null", "none"):
            return _filled(kind, 0)
        if text in ("true", "false"):
            return np.array([text == "true"])
        if text == "splat":
            self._expect("(")
            element = self._constant(self._type())
            self._expect(")")
            assert isinstance(kind, Vec)
            return np.repeat(element[:, None], kind.count, axis=1)
        if text in ("<", "[", "{"):
            return self._aggregate(kind, {"<": ">", "[": "]", "{": "}"}[text])
        if what == "name":
            if text not in self.globals:
                raise SimulationError(f"global {text} is not in LDS: {self.line}")
            return np.array([self.globals[text].address], np.uint64)
        if text in ("getelementptr", "addrspacecast", "inttoptr", "ptrtoint", "bitcast"):
            return self._constant_expression(text, kind)
        if what in ("number", "word"):
            return _number(kind, text)
        raise SimulationError(f"constant {text!r} is not modelled in: {self.line}")

    def _aggregate(self, kind: Type, close: str) -> Operand:
        parts = []
        while not self._accept(close):
            parts.append(self._constant(self._type()))
            self._accept(",")
        if isinstance(kind, Vec):
            return np.stack(parts, axis=1)
        return tuple(parts)

    def _constant_expression(self, op: str, kind: Type) -> Operand:
        if op != "getelementptr":
            self._expect("(")
            value = self._constant(self._type())
            if self._accept("to"):
                self._type()
            self._expect(")")
            return value
        while self._peek()[0] == "word" and self._peek()[1] in FLAGS:
            self._next()
        self._expect("(")
        element = self._type()
        self._expect(",")
        address = self._constant(self._type())
        steps = []
        while self._accept(","):
            index_type = self._type()
            value = self._constant(index_type)
            assert isinstance(index_type, Int)
            steps.append(int(value.astype(np.int64)[0]))
        self._expect(")")
        return address + np.uint64(_constant_offset(element, steps))


# --- constants -----------------------------------------------------------------------------------


def poison(kind: Type) -> Operand:
    """What a program must not depend on: NaN in floats, a pattern in integers."""
    if isinstance(kind, Float) and kind.kind != "bfloat":
        return np.array([np.nan], dtype_of(kind))
    return _filled(kind, 0xA5A5A5A5A5A5A5A5)


def _filled(kind: Type, bits: int) -> Operand:
    if isinstance(kind, Vec):
        element = poison(kind.element) if bits else _filled(kind.element, bits)
        return np.repeat(element[:, None], kind.count, axis=1)
    if isinstance(kind, Arr):
        return tuple(_filled(kind.element, bits) for _ in range(kind.count))
    if isinstance(kind, Struct):
        return tuple(_filled(element, bits) for element in kind.elements)
    if isinstance(kind, Float):
        value = np.nan if bits else 0.0
        if kind.kind == "bfloat":
            return np.array([0x7FC0 if bits else 0], np.uint16)
        return np.array([value], dtype_of(kind))
    if isinstance(kind, Int) and kind.bits == 1:
        return np.array([bool(bits)])
    width = 64 if isinstance(kind, Ptr) else kind.bits  # type: ignore[attr-defined]
    return np.array([bits & (2**width - 1)], dtype_of(kind))


def _number(kind: Type, text: str) -> Operand:
    if isinstance(kind, Float):
        return _float(kind, text)
    if isinstance(kind, Int):
        if kind.bits == 1:
            return np.array([text not in ("0", "false")])
        return np.array([int(text) & (2**kind.bits - 1)], dtype_of(kind))
    raise SimulationError(f"number {text!r} of type {kind} is not modelled")


def _float(kind: Float, text: str) -> Operand:
    """Decimal, ``0xH`` half, ``0xR`` bfloat, ``0x`` the bits of the value as a double."""
    if text.startswith("f0x"):
        width = {"half": 16, "bfloat": 16, "float": 32, "double": 64}[kind.kind]
        return np.array([int(text[3:], 16)], f"u{width // 8}").view(dtype_of(kind))
    if text.startswith("0xH"):
        return np.array([int(text[3:], 16)], np.uint16).view(np.float16)
    if text.startswith("0xR"):
        return np.array([int(text[3:], 16)], np.uint16)
    if text.startswith("0x"):
        value = struct.unpack("<d", struct.pack("<Q", int(text[2:], 16)))[0]
    else:
        value = float(text)
    if kind.kind == "bfloat":
        return (np.array([value], np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    with np.errstate(over="ignore"):
        return np.array([value], dtype_of(kind))


def _constant_offset(element: Type, steps: list[int]) -> int:
    offset, kind = steps[0] * size_of(element), element
    for step in steps[1:]:
        assert isinstance(kind, (Arr, Vec))
        kind = kind.element
        offset += step * size_of(kind)
    return offset
