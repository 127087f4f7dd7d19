"""The test variant whose CTAs start late: other kernels, and no trace of it in the usual ones."""

import tempfile

import pytest

from gcmoe.config import MoEConfig
from gcmoe.kernels.build import cache_key, kernel_class
from gcmoe.kernels.spec import kernel_spec, kernel_specs
from gcmoe.plan import make_plan
from gcmoe.protocol import Role

PLAN = make_plan(MoEConfig(256, 128, 4, 2, 16), 2)
ROLES = (Role.DISPATCH, Role.COMPUTE, Role.FINALIZE)


@pytest.mark.parametrize("role", ROLES)
def test_jitter_is_part_of_the_key(role):
    keys = {cache_key(kernel_spec(PLAN, role, "sm_90a", jitter_ns=ns)) for ns in (0, 1, 20_000)}
    assert len(keys) == 3


def test_all_roles_get_it():
    assert [spec.jitter_ns for spec in kernel_specs(PLAN, "sm_90a", jitter_ns=7)] == [7] * 3
    assert [spec.jitter_ns for spec in kernel_specs(PLAN, "sm_90a")] == [0] * 3


def ptx_of(role: Role, jitter_ns: int) -> str:
    cute = pytest.importorskip("cutlass.cute")
    spec = kernel_spec(PLAN, role, "sm_90a", jitter_ns=jitter_ns)
    kernel = kernel_class(role)(spec)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {spec.arch} --keep-ptx --dump-dir {folder}"
        return cute.compile(kernel, *kernel.example_arguments(), options=options).__ptx__


@pytest.mark.compile
@pytest.mark.parametrize("role", ROLES)
def test_the_delay_comes_first(role):
    plain, late = ptx_of(role, 0), ptx_of(role, 20_000)
    clocks = [text.count("%globaltimer") for text in (plain, late)]
    assert clocks[1] > clocks[0]
    # Nothing is read from memory and nothing is waited for before the delay and its barrier.
    body = late[late.index(".entry") :]
    before = body[: body.index("%globaltimer")]
    assert "ld.global" not in before
    assert "bar.sync" not in before
    assert "ld.acquire" not in before
    first_barrier = body.index("bar.sync") if "bar.sync" in body else body.index("barrier.sync")
    assert body.index("%globaltimer") < first_barrier
    assert "ld.global" not in body[:first_barrier]
