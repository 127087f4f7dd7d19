"""A PTX text as a list of instructions, with the scopes of inline assembly resolved."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z_$%][\w$]*")
_GUARD = re.compile(r"^@(!?)(%?[\w#$]+)\s+")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        guard: register that must be true, "" for none; ``negated`` inverts it.
        operation: opcode with its modifiers. operands: texts, brackets and braces kept.
    """

    guard: str
    negated: bool
    operation: str
    operands: tuple[str, ...]

    @property
    def parts(self) -> list[str]:
        return self.operation.split(".")


@dataclass(frozen=True, eq=False)
class Program:
    """The body of the one kernel of a text; ``labels`` are indices of instructions."""

    name: str
    instructions: list[Instruction]
    labels: dict[str, int]


def pieces(body: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of ``open``, ``close``, ``label`` and ``statement``, in order."""
    text, depth = "", 0
    i = 0
    while i < len(body):
        c = body[i]
        if not text.strip() and c in "{}":
            yield ("open" if c == "{" else "close"), ""
            text = ""
        elif c == ";" and depth == 0:
            yield "statement", text.strip()
            text = ""
        elif c == ":" and _NAME.fullmatch(text.strip()) and body[i + 1] != ":":
            yield "label", text.strip()
            text = ""
        else:
            depth += (c in "{[") - (c in "}]")
            text += c
        i += 1


def split_operands(text: str) -> tuple[str, ...]:
    """Operands at the outer level of brackets and braces."""
    found, depth = [""], 0
    for c in text:
        if c == "," and depth == 0:
            found.append("")
        else:
            depth += (c in "{[") - (c in "}]")
            found[-1] += c
    return tuple(part.strip() for part in found if part.strip())


def parse(ptx: str) -> Program:
    """The kernel of a text.

    Raises:
        ValueError: the text does not hold exactly one kernel.
    """
    names = re.findall(r"\.entry\s+([\w$]+)\s*\(", ptx)
    if len(names) != 1:
        raise ValueError(f"kernels {names}: one is expected")
    body = re.sub(r"//[^\n]*", "", ptx[ptx.index(".entry") :])
    body = body[body.index("{") + 1 : body.rindex("}")]
    items: list[tuple[int, str, str]] = []
    scopes: list[int] = [0]
    local: dict[int, set[str]] = {0: set()}
    for kind, text in pieces(body):
        if kind == "open":
            scopes.append(len(local))
            local[scopes[-1]] = set()
        elif kind == "close":
            scopes.pop()
        elif kind == "statement" and text.startswith(".reg"):
            if scopes[-1]:
                local[scopes[-1]].update(_NAME.findall(text.split(None, 2)[2]))
        elif text and not text.startswith("."):
            if kind == "label" and scopes[-1]:
                local[scopes[-1]].add(text)
            items.append((scopes[-1], kind, text))

    def resolved(scope: int, text: str) -> str:
        return _NAME.sub(lambda m: f"{m[0]}#{scope}" if m[0] in local[scope] else m[0], text)

    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for scope, kind, text in items:
        if kind == "label":
            labels[resolved(scope, text)] = len(instructions)
            continue
        guard = _GUARD.match(text)
        if guard:
            text = text[guard.end() :]
        operation, rest = text.split(None, 1) if len(text.split(None, 1)) == 2 else (text, "")
        instructions.append(
            Instruction(
                resolved(scope, guard[2]) if guard else "",
                bool(guard and guard[1]),
                operation,
                tuple(resolved(scope, operand) for operand in split_operands(rest)),
            )
        )
    return Program(names[0], instructions, labels)
