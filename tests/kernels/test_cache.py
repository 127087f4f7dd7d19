"""The kernel cache: keys, atomic writes, damage, and machines without the kernel language."""

import hashlib
import json
import multiprocessing
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gcmoe.config import MoEConfig
from gcmoe.errors import KernelCacheCorrupt, KernelNotCached
from gcmoe.kernels import build
from gcmoe.kernels.build import CompiledKernel
from gcmoe.kernels.spec import KernelSpec, kernel_spec, kernel_specs
from gcmoe.models import get_model
from gcmoe.plan import make_plan
from gcmoe.protocol import Role

SPEC = kernel_spec(make_plan(MoEConfig(4096, 2048, 32, 6, 8, clamp=10.0)), Role.FINALIZE, "sm_90a")


def fake_kernel(spec: KernelSpec, content: bytes = b"\x7fELF kernel") -> CompiledKernel:
    return CompiledKernel(spec.role, spec.symbol, content * 1000, 512, 1024, 40)


@pytest.fixture
def compiler(monkeypatch):
    """Counts compilations; no kernel language needed."""
    compiled = []

    def compile_kernel(spec):
        compiled.append(spec)
        return fake_kernel(spec)

    monkeypatch.setattr(build, "compile_kernel", compile_kernel)
    monkeypatch.setattr(build, "dsl_version", lambda: "4.8.1")
    return compiled


def without_dsl(monkeypatch):
    monkeypatch.setattr(build.util, "find_spec", lambda name: None)
    monkeypatch.setattr(build, "dsl_version", lambda: None)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_the_second_request_reads(tmp_path, compiler):
    first = build.get_kernel(SPEC, tmp_path)
    second = build.get_kernel(SPEC, tmp_path)
    assert len(compiler) == 1
    assert (first.from_cache, second.from_cache) == (False, True)
    assert replace(second, from_cache=False) == first
    manifest = json.loads(next(tmp_path.rglob("*.json")).read_text())
    assert manifest["sha256"] == hashlib.sha256(first.cubin).hexdigest()
    assert manifest["spec"]["clamp"] == 10.0
    assert manifest["dsl"] == "4.8.1"
    assert (manifest["symbol"], manifest["threads"]) == ("gcmoe_finalize_0", 512)
    assert len(files(tmp_path)) == 2


def test_the_directory_is_argument_then_environment_then_home(tmp_path, monkeypatch):
    monkeypatch.setenv("GCMOE_CACHE", str(tmp_path / "environment"))
    assert build.cache_directory(tmp_path / "argument") == tmp_path / "argument"
    assert build.cache_directory() == tmp_path / "environment"
    monkeypatch.delenv("GCMOE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.cache_directory() == tmp_path / ".cache" / "gcmoe"


def test_every_field_of_the_spec_is_in_the_key():
    atoms = replace(SPEC.shape, scale_columns=32)
    other = [
        replace(SPEC, role=Role.DISPATCH),
        replace(SPEC, arch="sm_100a", shape=atoms),
        replace(SPEC, arch="sm_103a", shape=atoms),
        replace(SPEC, num_experts=64),
        replace(SPEC, clamp=None),
        replace(SPEC, clamp=7.0),
        replace(SPEC, dispatch_ctas=16),
        replace(SPEC, trace=True),
        replace(SPEC, tiles=replace(SPEC.tiles, stages=3)),
        replace(SPEC, shape=replace(SPEC.shape, num_slots=2)),
        replace(SPEC, shape=replace(SPEC.shape, max_tokens=9)),
    ]
    keys = {build.cache_key(spec) for spec in (SPEC, *other)}
    assert len(keys) == len(other) + 1
    assert build.cache_key(replace(SPEC)) == build.cache_key(SPEC)


def test_a_spec_and_its_plan_are_of_one_family():
    with pytest.raises(ValueError, match=r"'sm_103a': the plan is for another family"):
        replace(SPEC, arch="sm_103a")
    with pytest.raises(ValueError, match=r"'sm_90a': the plan is for another family"):
        replace(SPEC, shape=replace(SPEC.shape, scale_columns=32))
    with pytest.raises(ValueError, match=r"arch = 'sm_120a': one of sm_90a, "):
        replace(SPEC, arch="sm_120a")


def test_the_source_is_in_the_key(tmp_path):
    for folder in build.SOURCE_FOLDERS:
        shutil.copytree(build.PACKAGE / folder, tmp_path / folder)
    before = build.source_digest(tmp_path)
    assert before == build.source_digest()
    for name, shapes_kernels in (
        ("kernels/build.py", False),
        ("kernels/ptx.py", True),
        ("protocol/ring.py", True),
        ("plan/layer.py", True),
    ):
        with (tmp_path / name).open("a") as file:
            file.write("# changed\n")
        build.source_digest.cache_clear()
        after = build.source_digest(tmp_path)
        assert (after != before) is shapes_kernels, name
        assert (build.cache_key(SPEC, after) != build.cache_key(SPEC, before)) is shapes_kernels
        before = after


def test_other_versions_of_the_language_have_their_own_entries(tmp_path, compiler, monkeypatch):
    build.get_kernel(SPEC, tmp_path)
    monkeypatch.setattr(build, "dsl_version", lambda: "4.9.0")
    assert not build.get_kernel(SPEC, tmp_path).from_cache
    assert len(compiler) == 2
    assert len({path.parent for path in files(tmp_path)}) == 1


def test_without_the_language_any_version_serves_the_newest_first(tmp_path, compiler, monkeypatch):
    for version, content in (("4.9.0", b"old"), ("4.10.1", b"new"), ("4.8.1", b"oldest")):
        build.store(SPEC, fake_kernel(SPEC, content), tmp_path, version)
    without_dsl(monkeypatch)
    assert build.get_kernel(SPEC, tmp_path).cubin.startswith(b"newnew")
    assert not compiler


def test_without_language_and_entry_the_error_holds_the_command(tmp_path, monkeypatch):
    without_dsl(monkeypatch)
    with pytest.raises(KernelNotCached) as caught:
        build.get_kernel(SPEC, tmp_path)
    text = str(caught.value)
    assert str(tmp_path) in text
    assert "gcmoe compile --hidden 4096 --intermediate 2048 --experts 32 --top-k 6" in text
    assert "--clamp 10.0 --ranks 1 --max-tokens 8 --dispatch-sms 8" in text
    assert "nvidia-cutlass-dsl" in text


def test_the_command_makes_that_very_kernel(tmp_path, compiler, monkeypatch, capsys):
    from gcmoe import cli

    config = MoEConfig(4096, 2048, 64, 6, 24, clamp=10.1234567)
    plan = make_plan(config, 2, dispatch_sms=24, ring_slots=64)
    spec = kernel_spec(plan, Role.FINALIZE, "sm_90a", trace=True)
    command = build.compile_command(spec, str(tmp_path)).split()
    assert command[0] == "gcmoe"
    assert cli.main(command[1:]) == 0
    without_dsl(monkeypatch)
    assert build.get_kernel(spec, tmp_path).from_cache
    assert capsys.readouterr().out.count("compiled") == 3


def damage(kind: str, manifest: Path) -> None:
    content = json.loads(manifest.read_text())
    cubin = manifest.parent / content["cubin"]
    if kind == "flipped byte":
        data = bytearray(cubin.read_bytes())
        data[77] ^= 1
        cubin.write_bytes(data)
    elif kind == "short cubin":
        cubin.write_bytes(cubin.read_bytes()[:-1])
    elif kind == "no cubin":
        cubin.unlink()
    elif kind == "no JSON":
        manifest.write_text("{")
    elif kind == "missing field":
        manifest.write_text(json.dumps({k: v for k, v in content.items() if k != "threads"}))
    else:
        content["spec"]["num_experts"] = 1
        manifest.write_text(json.dumps(content))


DAMAGES = {
    "flipped byte": ".cubin",
    "short cubin": ".cubin",
    "no cubin": ".cubin",
    "no JSON": ".json",
    "missing field": ".json",
    "other spec": ".json",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found_named_and_repaired(kind, tmp_path, compiler, monkeypatch):
    build.get_kernel(SPEC, tmp_path)
    damage(kind, next(tmp_path.rglob("*.json")))
    with monkeypatch.context() as patch:
        without_dsl(patch)
        with pytest.raises(KernelCacheCorrupt) as caught:
            build.get_kernel(SPEC, tmp_path)
        named = Path(str(caught.value).partition(": ")[0])
        assert named.suffix == DAMAGES[kind]
        assert tmp_path in named.parents
    with pytest.warns(UserWarning, match="compiling it again"):
        assert not build.get_kernel(SPEC, tmp_path).from_cache
    assert build.get_kernel(SPEC, tmp_path).from_cache
    assert len(compiler) == 2


def test_a_sound_entry_of_another_version_serves_in_place_of_a_damaged_one(
    tmp_path, compiler, monkeypatch
):
    build.store(SPEC, fake_kernel(SPEC, b"old"), tmp_path, "4.8.0")
    newest = build.store(SPEC, fake_kernel(SPEC, b"new"), tmp_path, "4.8.1")
    damage("flipped byte", newest)
    without_dsl(monkeypatch)
    assert build.get_kernel(SPEC, tmp_path).cubin.startswith(b"oldold")


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(build.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        build.store(SPEC, fake_kernel(SPEC), tmp_path, "4.8.1")
    assert files(tmp_path) == []


def test_the_manifest_comes_last(tmp_path, monkeypatch):
    order, real = [], os.replace

    def record(source, target):
        order.append(Path(target).suffix)
        real(source, target)

    monkeypatch.setattr(build.os, "replace", record)
    build.store(SPEC, fake_kernel(SPEC), tmp_path, "4.8.1")
    assert order == [".cubin", ".json"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, compiler):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.warns(UserWarning, match="not kept"):
        kernel = build.get_kernel(SPEC, blocked)
    assert kernel == fake_kernel(SPEC)


def _write_many(folder: str, content: bytes, rounds: int) -> None:
    for _ in range(rounds):
        build.store(SPEC, fake_kernel(SPEC, content), Path(folder), "4.8.1")


def test_two_processes_may_write_one_entry(tmp_path, monkeypatch):
    """Also when their compilers disagree, a reader finds either kernel whole."""
    context = multiprocessing.get_context("fork")
    contents = (b"one kernel", b"another kernel")
    build.store(SPEC, fake_kernel(SPEC, contents[0]), tmp_path, "4.8.1")
    writers = [
        context.Process(target=_write_many, args=(str(tmp_path), content, 60))
        for content in contents
    ]
    for writer in writers:
        writer.start()
    without_dsl(monkeypatch)
    reads = 0
    while reads < 50 or any(writer.is_alive() for writer in writers):
        kernel = build.get_kernel(SPEC, tmp_path)
        assert kernel.cubin in [content * 1000 for content in contents]
        reads += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert all(not path.name.startswith(".") for path in files(tmp_path))


# ------------------------------------------------------------------------------------------- PTX


def entry(*lines: str, symbol: str = SPEC.symbol) -> str:
    return f".visible .entry {symbol}(\n\t" + ",\n\t".join(lines) + "\n)\n.reqntid 512\n{\n}\n"


def finalize_parameters() -> list[str]:
    lines = []
    for i, parameter in enumerate(SPEC.parameters):
        name = f"{SPEC.symbol}_param_{i}"
        lines.append(
            {
                "peers": f".param .align 8 .b8 {name}[8]",
                "u64": f".param .u64 .ptr .global .align 16 {name}",
                "i64": f".param .b64 {name}",
                "i32": f".param .u32 {name}",
            }[parameter.kind]
        )
    return lines


def test_ptx_with_the_parameters_of_the_spec_passes():
    build.check_ptx(entry(*finalize_parameters()), SPEC)


def test_ptx_under_another_name_is_refused():
    with pytest.raises(RuntimeError, match="kernel_cutlass"):
        build.check_ptx(entry(*finalize_parameters(), symbol="kernel_cutlass_f_0"), SPEC)


@pytest.mark.parametrize(
    ("index", "line", "named"),
    [
        (0, ".param .align 8 .b8 p[16]", "peers"),
        (2, ".param .u32 p", "topk_ids"),
        (len(SPEC.parameters), ".param .align 1 .b8 p[1]", "none"),
        (len(SPEC.parameters) - 1, None, "compute_ctas"),
    ],
)
def test_ptx_with_other_parameters_names_the_first(index, line, named):
    lines = finalize_parameters()
    lines[index : index + 1] = [] if line is None else [line]
    with pytest.raises(RuntimeError, match=f"parameter {index} of .* {named} "):
        build.check_ptx(entry(*lines), SPEC)


def test_registers_of_something_that_is_no_cubin():
    assert build.cubin_registers(b"") is None
    assert build.cubin_registers(b"\x7fELF" + bytes(200)) is None


@pytest.mark.compile
@pytest.mark.parametrize("role", list(build.KERNELS["sm90"]))
def test_every_role_compiles_into_the_cache(role, tmp_path, monkeypatch):
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    spec = replace(SPEC, role=role)
    kernel = build.get_kernel(spec, tmp_path)
    assert kernel.registers
    without_dsl(monkeypatch)
    again = build.get_kernel(spec, tmp_path)
    assert (again.cubin, again.smem_bytes) == (kernel.cubin, kernel.smem_bytes)


@pytest.mark.compile
def test_the_command_fills_the_cache_for_blackwell(tmp_path, monkeypatch, capsys):
    """And the folder serves a machine without the compiler, for a GPU with other SMs too."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from gcmoe import cli

    words = "compile --arch sm_103a --model deepseek-v4.1-flash --ranks 8 --max-tokens 64 --out"
    assert cli.main([*words.split(), str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("compiled") == 3
    without_dsl(monkeypatch)
    plan = make_plan(get_model("deepseek-v4.1-flash").config(64), 8, 160, family="sm100")
    for spec in kernel_specs(plan, "sm_103a"):
        assert build.get_kernel(spec, tmp_path).from_cache
