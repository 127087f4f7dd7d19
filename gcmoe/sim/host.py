"""The host of a rank: launches replays in graph order, and resets collectively."""

from __future__ import annotations

from gcmoe.protocol import GRAPH_EDGES, Role
from gcmoe.sim.compute import compute, finalize
from gcmoe.sim.dispatch import dispatch
from gcmoe.sim.machine import Launch, RoleSteps, Simulation, Wait
from gcmoe.sim.memory import Actor, Cta, Steps

ROLES: tuple[tuple[Role, RoleSteps], ...] = (
    (Role.DISPATCH, dispatch),
    (Role.COMPUTE, compute),
    (Role.FINALIZE, finalize),
)


def start(sim: Simulation) -> None:
    """One host per rank; nothing else joins the ranks."""
    for rank in range(sim.config.ranks):
        cta = Cta(Role.HOST, rank, 0, 0)
        sim.spawn(f"host of rank {rank}", cta, lambda actor: host(sim, actor))


def host(sim: Simulation, actor: Actor) -> Steps:
    rank = actor.rank
    layers = sim.config.layers(rank)
    reset = sim.config.reset_after
    started = {role: 0 for role, _ in ROLES}
    if reset is not None:
        yield from replays(sim, rank, started, reset)
        if not sim.variant.skip_first_barrier:
            yield from barrier(sim, 0)
        yield "bases"
        sim.reset_rank(rank)
        if not sim.variant.skip_second_barrier:
            yield from barrier(sim, 1)
    yield from replays(sim, rank, started, len(layers))


def barrier(sim: Simulation, number: int) -> Steps:
    """A group barrier of the hosts."""
    sim.barriers[number] += 1
    addr = (-1, "@barrier", number)
    sim.wake(addr)
    yield Wait("barrier", addr, lambda _: sim.barriers[number] >= sim.config.ranks)


def replays(sim: Simulation, rank: int, started: dict[Role, int], limit: int) -> Steps:
    """Launches replays up to ``limit`` and waits for their end."""
    launches = sim.launches[rank]

    def ready() -> list[tuple[Role, RoleSteps]]:
        return [
            (role, steps)
            for role, steps in ROLES
            if started[role] < limit and may_start(sim, launches, role, started[role])
        ]

    def is_over() -> bool:
        return all(started[role] >= limit for role, _ in ROLES) and all(
            launch.ended(role) for launch in launches for role, _ in ROLES
        )

    while True:
        for role, steps in ready():
            yield "@kernels"
            replay = started[role]
            started[role] += 1
            launch_role(sim, rank, replay, role, steps)
        if is_over():
            return
        yield Wait("graph", (rank, "@kernels", 0), lambda _: is_over() or bool(ready()))


def may_start(sim: Simulation, launches: list[Launch], role: Role, replay: int) -> bool:
    """The graph edges into ``role``; compute and finalize also follow those of the replay before.

    Finalize may start before dispatch and compute of its replay do: on a GPU its edge behind
    compute only keeps it off the SMs that compute needs.
    """
    edges = sim.variant.graph_edges
    for edge in GRAPH_EDGES:
        if edge.after is not role or edge.name not in edges:
            continue
        before = replay - 1 if edge.next_replay else replay
        if before >= 0 and not (before < len(launches) and launches[before].ended(edge.before)):
            return False
    if not replay or role is Role.DISPATCH:
        return True
    last = launches[replay - 1]
    return last.is_over if role is Role.FINALIZE else last.ended(Role.COMPUTE)


def launch_role(sim: Simulation, rank: int, replay: int, role: Role, steps: RoleSteps) -> None:
    config, launches = sim.config, sim.launches[rank]
    if replay == len(launches):
        layer = config.layers(rank)[replay]
        num_blocks = len(sim.expected_blocks(rank, replay, layer))
        sim.most_blocks = max(sim.most_blocks, num_blocks)
        view = sim.check.ranks[rank]
        view.arrival_target = sim.arrivals.target(view.arrival_target, sim.valid_slots(layer, rank))
        launches.append(
            Launch(
                rank,
                replay,
                layer,
                {
                    Role.DISPATCH: config.grid(config.dispatch_ctas, rank, replay),
                    Role.COMPUTE: config.grid(config.compute_ctas, rank, replay)
                    + config.grid(config.late_ctas, rank, replay),
                    Role.FINALIZE: config.grid(config.finalize_ctas, rank, replay),
                },
                config.grid(config.block_rows, rank, replay),
                num_blocks,
                config.reset_after is not None and replay >= config.reset_after,
                sim.generation_of(replay),
            )
        )
    if role is Role.DISPATCH:
        sim.check.start_replay(rank, replay)
    sim.start_role(launches[replay], role, steps)
