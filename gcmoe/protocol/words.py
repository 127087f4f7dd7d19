"""Wrapping machine words for everything that runs protocol text outside a kernel.

Protocol methods use ``+ - * & | ^ << >>`` and comparisons only, so the same text traces on the
kernel language's ``Uint32``/``Uint64`` and runs here on :class:`Word32`/:class:`Word64`.
"""

from __future__ import annotations

from typing import ClassVar, Self


class Word:
    """An unsigned integer modulo ``2**BITS``; never mixes with another width."""

    BITS: ClassVar[int] = 0
    __slots__ = ("value",)

    def __init__(self, value: int | Word = 0) -> None:
        self.value = int(value) & ((1 << self.BITS) - 1)

    def _other(self, other: object) -> int:
        if isinstance(other, Word) and type(other) is not type(self):
            raise TypeError(f"mixed word widths: {self.BITS} and {other.BITS} bits")
        if isinstance(other, (int, Word)) and not isinstance(other, bool):
            return int(other)
        raise TypeError(f"{other!r} is not a word")

    def __int__(self) -> int:
        return self.value

    __index__ = __int__

    def __add__(self, other: object) -> Self:
        return type(self)(self.value + self._other(other))

    def __radd__(self, other: object) -> Self:
        return type(self)(self._other(other) + self.value)

    def __sub__(self, other: object) -> Self:
        return type(self)(self.value - self._other(other))

    def __rsub__(self, other: object) -> Self:
        return type(self)(self._other(other) - self.value)

    def __mul__(self, other: object) -> Self:
        return type(self)(self.value * self._other(other))

    def __rmul__(self, other: object) -> Self:
        return type(self)(self._other(other) * self.value)

    def __floordiv__(self, other: object) -> Self:
        return type(self)(self.value // (self._other(other) & ((1 << self.BITS) - 1)))

    def __and__(self, other: object) -> Self:
        return type(self)(self.value & self._other(other))

    def __rand__(self, other: object) -> Self:
        return type(self)(self._other(other) & self.value)

    def __or__(self, other: object) -> Self:
        return type(self)(self.value | self._other(other))

    def __ror__(self, other: object) -> Self:
        return type(self)(self._other(other) | self.value)

    def __xor__(self, other: object) -> Self:
        return type(self)(self.value ^ self._other(other))

    def __rxor__(self, other: object) -> Self:
        return type(self)(self._other(other) ^ self.value)

    def __lshift__(self, other: object) -> Self:
        return type(self)(self.value << self._other(other))

    def __rlshift__(self, other: object) -> Self:
        return type(self)(self._other(other) << self.value)

    def __rshift__(self, other: object) -> Self:
        return type(self)(self.value >> self._other(other))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, Word)):
            return self.value == self._other(other) & ((1 << self.BITS) - 1)
        return NotImplemented

    def __lt__(self, other: object) -> bool:
        return self.value < self._other(other)

    def __le__(self, other: object) -> bool:
        return self.value <= self._other(other)

    def __gt__(self, other: object) -> bool:
        return self.value > self._other(other)

    def __ge__(self, other: object) -> bool:
        return self.value >= self._other(other)

    def __hash__(self) -> int:
        return hash(self.value)  # equal to the int it compares equal to

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value:#x})"


class Word32(Word):
    """Counters, indices, targets."""

    BITS = 32
    __slots__ = ()


class Word64(Word):
    """Receive headers, entries, the W1 bitmap."""

    BITS = 64
    __slots__ = ()
