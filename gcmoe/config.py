"""The shape of one MoE layer, frozen and self-validating."""

from __future__ import annotations

from dataclasses import dataclass

MAX_INTERMEDIATE = 4096
MAX_TOP_K = 32
MAX_EXPERTS = 2048
MAX_RANKS = 72
MAX_TOKENS = 65536
MAX_ENTRIES = 1 << 20
MAX_SPIN_BUDGET_S = 60.0


def _require(ok: bool, name: str, value: object, bound: str, why: str) -> None:
    if not ok:
        raise ValueError(f"{name} = {value!r}: must be {bound}, because {why}")


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """One expert-parallel MoE layer, the same on every rank.

    Args:
        hidden: H, the model width; a multiple of 256.
        intermediate: I, the width of one expert; a multiple of 128, at most 4096.
        num_experts: E, experts over all ranks, at most 2048.
        top_k: k, expert slots of one token, at most 32.
        max_tokens: capacity, the most tokens that one rank passes in one call.
        clamp: limit L of the clamped SwiGLU (``gate <= L``, ``-L <= up <= L``); None for none.
        spin_budget_s: seconds that one device-side wait may last before the replay is aborted.

    Raises:
        ValueError: a value is outside its limit; names the value, the limit and the reason.
        TypeError: a size is not an ``int``, or the clamp not a number.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    max_tokens: int
    clamp: float | None = None
    spin_budget_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "num_experts", "top_k", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
            _require(value > 0, name, value, "positive", "it counts something")
        h, i, k, t = self.hidden, self.intermediate, self.top_k, self.max_tokens
        _require(h % 256 == 0, "hidden", h, "a multiple of 256", "W2 tiles have 256 output rows")
        _require(i % 128 == 0, "intermediate", i, "a multiple of 128", "W1 tiles are 128 columns")
        _require(
            i <= MAX_INTERMEDIATE,
            "intermediate",
            i,
            f"at most {MAX_INTERMEDIATE}",
            "the W1 bitmap of a ring slot has 64 bits of 64 columns each",
        )
        _require(
            self.num_experts <= MAX_EXPERTS,
            "num_experts",
            self.num_experts,
            f"at most {MAX_EXPERTS}",
            "an entry has 11 expert bits, and one rank may own all experts",
        )
        _require(k <= MAX_TOP_K, "top_k", k, f"at most {MAX_TOP_K}", "an entry has 5 slot bits")
        _require(
            t <= MAX_TOKENS, "max_tokens", t, f"at most {MAX_TOKENS}", "an entry has 16 token bits"
        )
        _require(
            t * k < MAX_ENTRIES,
            "max_tokens * top_k",
            t * k,
            f"below {MAX_ENTRIES}",
            "a receive header has 20 count bits",
        )
        if self.clamp is not None:
            if isinstance(self.clamp, bool) or not isinstance(self.clamp, (int, float)):
                raise TypeError(f"clamp must be None or a number, got {self.clamp!r}")
            # One spelling of a limit: it is part of the identity of a kernel.
            object.__setattr__(self, "clamp", float(self.clamp))
            _require(
                0.0 < self.clamp < float("inf"),
                "clamp",
                self.clamp,
                "None or a positive finite number",
                "it bounds gate from above and up on both sides",
            )
        _require(
            0.0 < self.spin_budget_s <= MAX_SPIN_BUDGET_S,
            "spin_budget_s",
            self.spin_budget_s,
            f"in (0, {MAX_SPIN_BUDGET_S:g}]",
            "a rank that is silent for a minute is lost, and the GPU spins meanwhile",
        )

    def local_experts(self, num_ranks: int) -> int:
        """EL, the experts of one rank.

        Raises:
            ValueError: ``num_ranks`` is outside [1, 72] or does not divide E.
            TypeError: ``num_ranks`` is not an ``int``.
        """
        if isinstance(num_ranks, bool) or not isinstance(num_ranks, int):
            raise TypeError(f"num_ranks must be an int, got {num_ranks!r}")
        _require(
            1 <= num_ranks <= MAX_RANKS,
            "num_ranks",
            num_ranks,
            f"in [1, {MAX_RANKS}]",
            "the peer table is passed by value and ring metadata has 7 rank bits",
        )
        _require(
            self.num_experts % num_ranks == 0,
            "num_experts",
            self.num_experts,
            f"a multiple of the {num_ranks} ranks",
            "each rank owns the same number of consecutive experts",
        )
        return self.num_experts // num_ranks
