"""Textual LLVM IR to instructions: :func:`parse`. What FlyDSL and Triton emit, and no more.

The grammar is that of the LLVM language reference. Attributes, metadata and fast-math flags are
read past; fast-math flags only allow results to differ, they never require it.
"""

import re
from typing import Any

import numpy as np

from minuet.testing.amdgpu.ir import (
    BARRIERS,
    BINARY,
    CASTS,
    Block,
    Function,
    Global,
    Instruction,
    Module,
    Operand,
)
from minuet.testing.amdgpu.reader import FLAGS, Reader
from minuet.testing.amdgpu.state import SimulationError
from minuet.testing.amdgpu.types import (
    Int,
    Struct,
    Type,
    Vec,
    Void,
    size_of,
)


def parse(text: str) -> Module:
    """Read a module.

    Raises:
        SimulationError: syntax that is not modelled.
    """
    return _Parser(text).module()


class _Parser(Reader):
    def __init__(self, text: str):
        super().__init__()
        self.lines = text.splitlines()
        self.pending = ""  # a switch that goes on over lines

    # --- module ----------------------------------------------------------------------------------

    def module(self) -> Module:
        for line in self.lines:
            if line.startswith("@") and "addrspace(3)" in line:
                self._global(line)
        lds = self._lay_out()
        kernels: dict[str, Function] = {}
        number = 0
        while number < len(self.lines):
            if self.lines[number].startswith("define"):
                end = number
                while self.lines[end] != "}":
                    end += 1
                function = self._function(self.lines[number : end + 1])
                kernels[function.name] = function
                number = end
            number += 1
        return Module(kernels, self.globals, lds)

    def _global(self, line: str) -> None:
        self._tokenize(line)
        name = self._next()[1]
        while self._peek()[1] not in ("global", "constant"):
            self._next()
        self._next()
        kind = self._type()
        align = re.search(r"align (\d+)", line)
        self.globals[name] = Global(name, size_of(kind), int(align.group(1)) if align else 16)

    def _lay_out(self) -> int:
        end = 0
        # the zero-sized variable is the start of dynamic LDS and comes last
        for variable in sorted(self.globals.values(), key=lambda g: (g.bytes == 0, g.name)):
            variable.address = -(-end // variable.align) * variable.align
            end = variable.address + variable.bytes
        return end

    def _function(self, lines: list[str]) -> Function:
        self._tokenize(lines[0])
        while self._peek()[0] != "name" or not self._peek()[1].startswith("@"):
            self._next()
        name = self._next()[1][1:].strip('"')
        self._expect("(")
        params: list[tuple[str, Type]] = []
        while self._peek()[1] != ")":
            kind = self._type()
            self._skip_param_attributes()
            name_of = self._next()[1] if self._peek()[0] == "name" else f"%{len(params)}"
            params.append((name_of, kind))
            self._accept(",")
        first = Block(f"%{len(params)}")
        blocks = [first]
        for line in lines[1:-1]:
            body = line.split(";")[0].rstrip() if '"' not in line else line.rstrip()
            if not body:
                continue
            label = re.match(r"^([-\w.$]+|\"[^\"]*\"):", body)
            if label and not line.startswith(" "):
                name_ = "%" + label.group(1)
                if blocks[-1] is first and not first.code:
                    first.name = first.origin = name_
                else:
                    blocks.append(Block(name_, origin=name_))
                continue
            self._statement(blocks, body)
        first.origin = first.origin or first.name
        return Function(name, params, blocks)

    def _statement(self, blocks: list[Block], body: str) -> None:
        block = blocks[-1]
        block.origin = block.origin or block.name
        stripped = body.strip()
        if self.pending or (stripped.startswith("switch") and "]" not in stripped):
            self.pending = f"{self.pending} {stripped}"
            if "]" not in stripped:
                return
            stripped, self.pending = self.pending, ""
        instruction = self._instruction(stripped)
        if instruction is None:
            return
        if instruction.op == "phi":
            block.phis[instruction.result] = (instruction.type, instruction.extra)
            return
        block.code.append(instruction)
        if instruction.op == "barrier":
            rest = f"{block.name}.after{len(blocks)}"
            block.falls_to = rest
            blocks.append(Block(rest, origin=block.origin))

    # --- instructions ----------------------------------------------------------------------------

    def _instruction(self, body: str) -> Instruction | None:
        self._tokenize(body)
        result = ""
        if self._peek()[0] == "name" and self._peek(1)[1] == "=":
            result = self._next()[1]
            self._next()
        while self._peek()[1] in FLAGS:
            self._next()
        if self._peek()[0] == "meta":
            raise SimulationError(f"metadata statement: {body}")
        op = self._next()[1]
        while self._peek()[0] == "word" and self._peek()[1] in FLAGS:
            self._next()
        if op.startswith("llvm.dbg") or body.startswith("#dbg"):
            return None
        method = getattr(self, f"_op_{op}", None)
        if op in BINARY:
            method = self._binary
        elif op in CASTS:
            method = self._cast
        if method is None:
            raise SimulationError(f"instruction {op!r} is not modelled: {body}")
        instruction: Instruction | None = method(op, result)
        return instruction

    def _make(
        self,
        op: str,
        result: str,
        kind: Type,
        operands: list[Operand],
        types: list[Type],
        extra: Any = None,
    ) -> Instruction:
        return Instruction(op, result, kind, operands, types, extra, self.line)

    def _typed(self) -> tuple[Type, Operand]:
        kind = self._type()
        self._skip_param_attributes()
        return kind, self._operand(kind)

    def _binary(self, op: str, result: str) -> Instruction:
        kind, a = self._typed()
        self._expect(",")
        return self._make(op, result, kind, [a, self._operand(kind)], [kind, kind])

    def _cast(self, op: str, result: str) -> Instruction:
        source, a = self._typed()
        self._expect("to")
        return self._make(op, result, self._type(), [a], [source])

    def _op_fneg(self, op: str, result: str) -> Instruction:
        kind, a = self._typed()
        return self._make(op, result, kind, [a], [kind])

    _op_freeze = _op_fneg

    def _compare(self, op: str, result: str) -> Instruction:
        predicate = self._next()[1]
        kind, a = self._typed()
        self._expect(",")
        b = self._operand(kind)
        boolean: Type = Vec(kind.count, Int(1)) if isinstance(kind, Vec) else Int(1)
        return self._make(op, result, boolean, [a, b], [kind, kind], predicate)

    _op_icmp = _compare
    _op_fcmp = _compare

    def _op_select(self, op: str, result: str) -> Instruction:
        pairs = [self._typed()]
        for _ in range(2):
            self._expect(",")
            pairs.append(self._typed())
        return self._make(op, result, pairs[1][0], [p[1] for p in pairs], [p[0] for p in pairs])

    def _op_phi(self, op: str, result: str) -> Instruction:
        kind = self._type()
        incoming: dict[str, Operand] = {}
        while True:
            self._expect("[")
            value = self._operand(kind)
            self._expect(",")
            incoming[self._next()[1]] = value
            self._expect("]")
            if not self._accept(","):
                break
            if self._peek()[0] == "meta":
                break
        return self._make(op, result, kind, [], [], incoming)

    def _op_br(self, op: str, result: str) -> Instruction:
        if self._accept("label"):
            return self._make("br", "", Void(), [], [], (self._next()[1],))
        kind, condition = self._typed()
        targets = []
        for _ in range(2):
            self._expect(",")
            self._expect("label")
            targets.append(self._next()[1])
        return self._make("br", "", Void(), [condition], [kind], tuple(targets))

    def _op_switch(self, op: str, result: str) -> Instruction:
        kind, value = self._typed()
        self._expect(",")
        self._expect("label")
        default = self._next()[1]
        self._expect("[")
        cases = []
        while not self._accept("]"):
            case = self._constant(self._type())
            self._expect(",")
            self._expect("label")
            cases.append((case, self._next()[1]))
        return self._make(op, "", Void(), [value], [kind], (default, cases))

    def _op_ret(self, op: str, result: str) -> Instruction:
        return self._make(op, "", Void(), [], [])

    _op_unreachable = _op_ret

    def _op_fence(self, op: str, result: str) -> None:
        return None  # memory is sequentially consistent here; barriers are what the race check sees

    def _op_load(self, op: str, result: str) -> Instruction:
        kind = self._type()
        self._expect(",")
        space, address = self._typed()
        return self._make(op, result, kind, [address], [space], self._alignment(kind))

    def _op_store(self, op: str, result: str) -> Instruction:
        kind, value = self._typed()
        self._expect(",")
        space, address = self._typed()
        return self._make(op, "", kind, [value, address], [kind, space], self._alignment(kind))

    def _alignment(self, kind: Type) -> int:
        found = re.search(r", align (\d+)", self.line)
        return int(found.group(1)) if found else size_of(kind)

    def _op_atomicrmw(self, op: str, result: str) -> Instruction:
        what = self._next()[1]
        space, address = self._typed()
        self._expect(",")
        kind, value = self._typed()
        return self._make(op, result, kind, [address, value], [space, kind], what)

    def _op_getelementptr(self, op: str, result: str) -> Instruction:
        element = self._type()
        self._expect(",")
        space, base = self._typed()
        operands, types = [base], [space]
        while self._accept(","):
            if self._peek()[0] == "meta":
                break
            kind, index = self._typed()
            operands.append(index)
            types.append(kind)
        return self._make(op, result, space, operands, types, element)

    def _op_extractelement(self, op: str, result: str) -> Instruction:
        pairs = self._pairs()
        vector = pairs[0][0]
        assert isinstance(vector, Vec)
        return self._make(op, result, vector.element, [p[1] for p in pairs], [p[0] for p in pairs])

    def _op_insertelement(self, op: str, result: str) -> Instruction:
        pairs = self._pairs()
        return self._make(op, result, pairs[0][0], [p[1] for p in pairs], [p[0] for p in pairs])

    def _op_shufflevector(self, op: str, result: str) -> Instruction:
        pairs = self._pairs()
        vector = pairs[0][0]
        assert isinstance(vector, Vec)
        mask = pairs[2][1].astype(np.int64)[0]
        kind = Vec(len(mask), vector.element)
        return self._make(op, result, kind, [pairs[0][1], pairs[1][1]], [vector, vector], mask)

    def _pairs(self) -> list[tuple[Type, Operand]]:
        pairs = [self._typed()]
        while self._accept(","):
            if self._peek()[0] == "meta":
                break
            pairs.append(self._typed())
        return pairs

    def _indices(self) -> list[int]:
        found = []
        while self._accept(","):
            if self._peek()[0] == "meta":
                break
            found.append(int(self._next()[1]))
        return found

    def _op_extractvalue(self, op: str, result: str) -> Instruction:
        kind, value = self._typed()
        indices = self._indices()
        inner = kind
        for index in indices:
            inner = inner.elements[index] if isinstance(inner, Struct) else inner.element  # type: ignore[attr-defined]
        return self._make(op, result, inner, [value], [kind], indices)

    def _op_insertvalue(self, op: str, result: str) -> Instruction:
        kind, value = self._typed()
        self._expect(",")
        part_kind, part = self._typed()
        return self._make(op, result, kind, [value, part], [kind, part_kind], self._indices())

    def _op_call(self, op: str, result: str) -> Instruction:
        self._skip_param_attributes()
        while self._peek()[0] == "word" and self._peek()[1] in FLAGS:
            self._next()
        self._skip_param_attributes()
        kind = self._type()
        self._skip_param_attributes()
        if self._peek()[1] == "(":
            self._skip_group()
        callee = self._next()[1]
        if callee == "asm":
            return self._asm(kind, result)
        callee = callee[1:].strip('"')
        operands: list[Operand] = []
        types: list[Type] = []
        self._expect("(")
        while not self._accept(")"):
            if self._peek()[1] == "metadata":
                operands.append(None)
                types.append(Void())
                self._next()
                while self._peek()[1] not in (",", ")"):
                    self._next()
            else:
                argument, value = self._typed()
                operands.append(value)
                types.append(argument)
            self._accept(",")
        if callee in BARRIERS:
            return self._make("barrier", "", Void(), [], [])
        return self._make("call", result, kind, operands, types, callee)

    def _asm(self, kind: Type, result: str) -> Instruction:
        while self._peek()[0] == "word":
            self._next()
        text = self._next()[1].strip('"')
        self._accept(",")
        self._next()
        operands: list[Operand] = []
        types: list[Type] = []
        self._expect("(")
        while not self._accept(")"):
            argument, value = self._typed()
            operands.append(value)
            types.append(argument)
            self._accept(",")
        return self._make("call", result, kind, operands, types, f"asm {text}".strip())
