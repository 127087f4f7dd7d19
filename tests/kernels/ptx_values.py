"""Values of registers in a PTX text: what its integer arithmetic makes of chosen inputs.

A register with one definition by an instruction of :data:`OPERATIONS` is computed from its
operands. Every other register is an input: a loop variable, which has several definitions, or what
a load or another instruction brings. Shared memory begins where the machine puts it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ptx_machine import SHARED_BASE

OPERATIONS: dict[str, Callable[..., int]] = {
    "mov": lambda a: a,
    "cvt": lambda a: a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "mul.wide": lambda a, b: a * b,
    "mad.lo": lambda a, b, c: a * b + c,
    "mad.wide": lambda a, b, c: a * b + c,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
_DEFINITION = re.compile(r"^\s*([a-z][\w.:]*)\s+(%\w+),\s*(.*);\s*(?://.*)?$")
_NAME = re.compile(rf"^({'|'.join(map(re.escape, OPERATIONS))})\.([\w.]*)$")


@dataclass(frozen=True)
class Definition:
    """``function`` of ``arguments``, kept to ``bits`` bits; None for what is an input."""

    function: Callable[..., int] | None
    bits: int
    arguments: tuple[str, ...]


@dataclass
class Values:
    """The definitions of a PTX text."""

    ptx: str
    definitions: dict[str, list[Definition]] = field(init=False)

    def __post_init__(self) -> None:
        self.definitions = {}
        for line in self.ptx.splitlines():
            match = _DEFINITION.match(line)
            if match:
                operation, register, rest = match.groups()
                definition = self._definition(operation, register, rest)
                self.definitions.setdefault(register, []).append(definition)

    def _definition(self, operation: str, register: str, rest: str) -> Definition:
        name = _NAME.match(operation)
        arguments = tuple(part.strip() for part in rest.split(","))
        bits = 64 if register.startswith("%rd") else 32
        is_plain = all(re.fullmatch(r"%r\w*|-?\d+|__dynamic_shmem__\d+", a) for a in arguments)
        if name is None or not is_plain:
            return Definition(None, bits, ())
        return Definition(OPERATIONS[name[1]], bits, arguments)

    def computed(self, register: str) -> Definition | None:
        """The definition of a register that is not an input."""
        found = self.definitions.get(register, [])
        return found[0] if len(found) == 1 and found[0].function else None

    def inputs(self, *operands: str) -> set[str]:
        """The registers that operands are computed from in the end."""
        result: set[str] = set()
        for operand in operands:
            if operand.startswith("%"):
                definition = self.computed(operand)
                result |= self.inputs(*definition.arguments) if definition else {operand}
        return result

    def value(self, operand: str, inputs: Mapping[str, int] | None = None) -> int:
        """The value of a register, an immediate or the start of shared memory.

        Raises:
            KeyError: it needs an input that ``inputs`` does not have.
        """
        if not operand.startswith("%"):
            return SHARED_BASE if operand.startswith("__dynamic") else int(operand)
        definition = self.computed(operand)
        if definition is None:
            return (inputs or {})[operand]
        assert definition.function
        arguments = [self.value(argument, inputs) for argument in definition.arguments]
        return int(definition.function(*arguments)) & ((1 << definition.bits) - 1)
