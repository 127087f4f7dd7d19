"""Compiles kernels to cubins and keeps them on disk. Launches nothing and needs no GPU.

The kernel language is imported only to compile: a filled cache serves machines without it. An
entry is a cubin and a JSON manifest. Its folder is named by the hash of what shapes the kernel (the
spec, the source of the kernels, the format of the cache), its files by the version of the kernel
language and, for the cubin, its own checksum, so that two processes may write one entry at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

from gcmoe.errors import KernelCacheCorrupt, KernelNotCached
from gcmoe.kernels.spec import KernelSpec, Parameter
from gcmoe.plan.targets import Family
from gcmoe.protocol import Role

KERNELS: dict[Family, dict[Role, str]] = {
    "sm90": {
        Role.DISPATCH: "gcmoe.kernels.dispatch:DispatchKernel",
        Role.COMPUTE: "gcmoe.kernels.compute_sm90:ComputeKernel",
        Role.FINALIZE: "gcmoe.kernels.finalize:FinalizeKernel",
    },
    "sm100": {
        Role.DISPATCH: "gcmoe.kernels.dispatch_sm100:DispatchKernelSm100",
        Role.COMPUTE: "gcmoe.kernels.compute_sm100:ComputeKernelSm100",
        Role.FINALIZE: "gcmoe.kernels.finalize:FinalizeKernel",
    },
}
"""The kernel class of each family and role. A class takes the spec; an instance has ``threads``,
``smem_bytes`` and ``example_arguments()`` and is what the kernel language compiles."""

OPTIONS = "--keep-ptx --keep-cubin"
FORMAT = 1
CACHE_ENVIRONMENT = "GCMOE_CACHE"
PACKAGE = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = ("kernels", "protocol", "plan")
# Files of those folders that shape no kernel.
HOST_FILES = (
    *(f"kernels/{name}.py" for name in ("build", "compile", "document", "variants")),
    *(
        f"plan/{name}.py"
        for name in ("fit", "fitted", "gpus", "predict", "published", "report", "routing")
    ),
    "protocol/document.py",
)
DSL_PACKAGE = "nvidia-cutlass-dsl"


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel that can be loaded.

    Args:
        role: which kernel.
        symbol: its name in the cubin.
        cubin: ELF image.
        threads: of one CTA.
        smem_bytes: dynamic shared memory of one CTA.
        registers: per thread at launch, None if the image does not tell.
        from_cache: read from disk, not compiled by this call.
    """

    role: Role
    symbol: str
    cubin: bytes
    threads: int
    smem_bytes: int
    registers: int | None = None
    from_cache: bool = False

    @property
    def checksum(self) -> str:
        """SHA-256 of the cubin, in hexadecimal."""
        return hashlib.sha256(self.cubin).hexdigest()


# ------------------------------------------------------------------------------------- parameters


def parameter_size(parameter: Parameter, num_ranks: int) -> tuple[int, int]:
    """(bytes, alignment) of one kernel parameter."""
    if parameter.kind == "peers":
        return 8 * num_ranks, 8
    return {"u64": (8, 8), "i64": (8, 8), "i32": (4, 4), "tensor_map": (128, 64)}[parameter.kind]


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)", re.DOTALL)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]\d+)\s*(.*)", re.DOTALL)


def ptx_entries(ptx: str) -> dict[str, list[tuple[int, int]]]:
    """(bytes, alignment) of the parameters of every kernel in a PTX text, by kernel name."""
    entries = {}
    for name, text in _ENTRY.findall(ptx):
        found = []
        for line in text.split(","):
            match = _PARAM.search(line)
            if match is None:
                continue
            align, dtype, rest = match.groups()
            unit = int(dtype[1:]) // 8
            # ".ptr .global .align 16 name" or "name[128]": only a bracket makes it an array.
            count = re.search(r"\[(\d+)\]", rest)
            found.append((unit * int(count[1]) if count else unit, int(align or unit)))
        entries[name] = found
    return entries


def check_ptx(ptx: str, spec: KernelSpec) -> None:
    """The PTX holds one kernel, under the name and with the parameters of ``spec``.

    Raises:
        RuntimeError: it does not: the kernel class and ``spec.parameters`` have diverged.
    """
    entries = ptx_entries(ptx)
    if list(entries) != [spec.symbol]:
        raise RuntimeError(f"the PTX has kernels {list(entries)}, expected [{spec.symbol!r}]")
    wanted = [parameter_size(p, spec.shape.num_ranks) for p in spec.parameters]
    found = entries[spec.symbol]
    for i in range(max(len(wanted), len(found))):
        name = spec.parameters[i].name if i < len(wanted) else "none"
        want = wanted[i] if i < len(wanted) else None
        have = found[i] if i < len(found) else None
        if want is None or have is None or have[0] != want[0]:
            raise RuntimeError(
                f"parameter {i} of {spec.symbol} has (bytes, alignment) {have}, the spec's "
                f"{name} {want}"
            )


def cubin_registers(cubin: bytes) -> int | None:
    """Registers per thread at launch, of a cubin with one kernel; None where it does not tell."""
    return _cubin_attribute(cubin, 0x2F)  # EIATTR_REGCOUNT


def cubin_stack(cubin: bytes) -> int | None:
    """Bytes of stack per thread, of a cubin with one kernel: more than 0 means that it spills or
    indexes registers; None where it does not tell."""
    return _cubin_attribute(cubin, 0x11)  # EIATTR_FRAME_SIZE


def _cubin_attribute(cubin: bytes, attribute: int) -> int | None:
    """A value of the section ``.nv.info`` of a cubin with one kernel."""
    try:
        (table,) = struct.unpack_from("<Q", cubin, 40)
        entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 58)
        headers = [
            struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)
        ]
        names = headers[names_index][4]
        for name, _, _, _, offset, size in headers:
            start = names + name
            if cubin[start : cubin.index(b"\0", start)] == b".nv.info":
                return _attribute_value(cubin[offset : offset + size], attribute)
    except (struct.error, ValueError, IndexError):
        pass
    return None


def _attribute_value(info: bytes, wanted: int) -> int | None:
    """The value of an attribute in ``.nv.info``: records of format, attribute, size, payload."""
    sized_value, at = 4, 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if (form, attribute) == (sized_value, wanted):
            return int(struct.unpack_from("<II", info, at + 4)[1])
        at += 4 + (size if form == sized_value else 0)
    return None


# ---------------------------------------------------------------------------------------- compile


def dsl_version() -> str | None:
    """Version of the kernel language; None where it is not installed."""
    if util.find_spec("cutlass") is None:
        return None
    try:
        return metadata.version(DSL_PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def kernel_class(role: Role, family: Family = "sm90") -> Any:
    """The class of :data:`KERNELS`; imports the kernel language."""
    module, _, name = KERNELS[family][role].partition(":")
    return getattr(import_module(module), name)


def compile_kernel(spec: KernelSpec) -> CompiledKernel:
    """Trace, compile and assemble one kernel.

    Raises:
        ModuleNotFoundError: the kernel language is not installed.
        RuntimeError: the kernel's name or parameters differ from ``spec``.
    """
    import cutlass.cute as cute

    kernel = kernel_class(spec.role, spec.family)(spec)
    with tempfile.TemporaryDirectory(prefix="gcmoe-") as folder:
        options = f"{OPTIONS} --gpu-arch {spec.arch} --dump-dir {folder}"
        compiled = cute.compile(kernel, *kernel.example_arguments(), options=options)
        ptx, cubin = compiled.__ptx__, bytes(compiled.__cubin__)
    check_ptx(ptx, spec)
    registers = cubin_registers(cubin)
    return CompiledKernel(
        spec.role, spec.symbol, cubin, int(kernel.threads), int(kernel.smem_bytes), registers
    )


# ------------------------------------------------------------------------------------------ cache


def cache_directory(directory: str | os.PathLike[str] | None = None) -> Path:
    """``directory``, else the environment's ``GCMOE_CACHE``, else ``~/.cache/gcmoe``."""
    chosen = directory or os.environ.get(CACHE_ENVIRONMENT) or Path.home() / ".cache" / "gcmoe"
    return Path(chosen).expanduser()


def source_files(package: Path = PACKAGE) -> list[Path]:
    """The files that shape kernels, in a fixed order."""
    files = [f for folder in SOURCE_FOLDERS for f in (package / folder).rglob("*.py")]
    return sorted(f for f in files if f.relative_to(package).as_posix() not in HOST_FILES)


@cache
def source_digest(package: Path = PACKAGE) -> str:
    """SHA-256 over names and contents of :func:`source_files`; read once in a process."""
    digest = hashlib.sha256()
    for file in source_files(package):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def spec_fields(spec: KernelSpec) -> dict[str, Any]:
    """The spec as JSON values."""
    fields = asdict(spec) | {"role": spec.role.name.lower()}
    return json.loads(json.dumps(fields))  # type: ignore[no-any-return]


def cache_key(spec: KernelSpec, source: str | None = None) -> str:
    """SHA-256 of what shapes the kernel, apart from the version of the kernel language."""
    content = {
        "format": FORMAT,
        "options": OPTIONS,
        "spec": spec_fields(spec),
        "source": source or source_digest(),
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def entry_folder(spec: KernelSpec, cache_dir: Path) -> Path:
    """Folder of the entries of ``spec``, one for each version of the kernel language."""
    return cache_dir / f"{spec.role.name.lower()}-{cache_key(spec)[:32]}"


def _write(path: Path, content: bytes) -> None:
    """All or nothing, also for readers in other processes and after a crash."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def store(spec: KernelSpec, kernel: CompiledKernel, cache_dir: Path, version: str) -> Path:
    """Write an entry, its manifest last; returns the manifest's path.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = entry_folder(spec, cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    cubin = folder / f"{version}-{kernel.checksum[:16]}.cubin"
    _write(cubin, kernel.cubin)
    manifest = {
        "format": FORMAT,
        "spec": spec_fields(spec),
        "source": source_digest(),
        "dsl": version,
        "cubin": cubin.name,
        "sha256": kernel.checksum,
        "symbol": kernel.symbol,
        "threads": kernel.threads,
        "smem_bytes": kernel.smem_bytes,
        "registers": kernel.registers,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    path = folder / f"{version}.json"
    _write(path, json.dumps(manifest, indent=1, sort_keys=True).encode())
    return path


def load(spec: KernelSpec, manifest_path: Path) -> CompiledKernel:
    """Read and verify one entry.

    Raises:
        KernelCacheCorrupt: manifest or cubin are damaged or belong to another spec; names the file.
    """
    try:
        manifest = json.loads(manifest_path.read_bytes())
        cubin_path = manifest_path.parent / Path(manifest["cubin"]).name
        wanted = (spec_fields(spec), source_digest(), spec.symbol)
        if (manifest["spec"], manifest["source"], manifest["symbol"]) != wanted:
            raise KernelCacheCorrupt(f"{manifest_path}: describes another kernel")
        threads, smem_bytes = int(manifest["threads"]), int(manifest["smem_bytes"])
        registers, checksum = manifest["registers"], manifest["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KernelCacheCorrupt(f"{manifest_path}: not a manifest: {error!r}") from error
    try:
        cubin = cubin_path.read_bytes()
    except OSError as error:
        raise KernelCacheCorrupt(f"{cubin_path}: cannot be read: {error!r}") from error
    kernel = CompiledKernel(
        spec.role, spec.symbol, cubin, threads, smem_bytes, registers, from_cache=True
    )
    if kernel.checksum != checksum:
        raise KernelCacheCorrupt(
            f"{cubin_path}: SHA-256 is {kernel.checksum}, its manifest says {checksum}"
        )
    return kernel


def manifests(spec: KernelSpec, cache_dir: Path, version: str | None) -> Iterator[Path]:
    """Manifests that may serve ``spec``: of one version, or of any where it is None, newest first.

    The entry of a machine without the kernel language may come from any version of it.
    """
    folder = entry_folder(spec, cache_dir)
    if version is not None:
        path = folder / f"{version}.json"
        yield from [path] if path.is_file() else []
        return

    def order(path: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", path.stem)]

    yield from sorted(folder.glob("[!.]*.json"), key=order, reverse=True)


def find(spec: KernelSpec, cache_dir: Path, version: str | None) -> CompiledKernel | None:
    """The first sound entry; None if there is none at all.

    Raises:
        KernelCacheCorrupt: there are entries, and all are damaged.
    """
    damage = None
    for path in manifests(spec, cache_dir, version):
        try:
            return load(spec, path)
        except KernelCacheCorrupt as error:
            damage = error
    if damage is not None:
        raise damage
    return None


def get_kernel(spec: KernelSpec, cache_dir: str | os.PathLike[str] | None = None) -> CompiledKernel:
    """The kernel of ``spec``: from the cache, else compiled and stored.

    Args:
        cache_dir: folder of the cache; None takes ``GCMOE_CACHE`` or ``~/.cache/gcmoe``.

    Raises:
        KernelNotCached: not in the cache, and the kernel language is not installed; the message
            holds the command that fills the cache.
        KernelCacheCorrupt: the entry is damaged and the kernel language is not installed. With it,
            a damaged entry is replaced.
    """
    directory, version = cache_directory(cache_dir), dsl_version()
    try:
        kernel = find(spec, directory, version)
    except KernelCacheCorrupt as error:
        if version is None:
            raise
        warnings.warn(f"kernel cache: {error}; compiling it again", stacklevel=2)
        kernel = None
    if kernel is not None:
        return kernel
    if version is None:
        raise KernelNotCached(
            f"{spec.symbol} for {spec.arch} is not in {directory}, and {DSL_PACKAGE}, which would "
            f"compile it, is not installed. Where it is, run\n    {compile_command(spec)}\n"
            f"and copy what is in kernels/ to {directory}, or set {CACHE_ENVIRONMENT} to the folder"
        )
    kernel = compile_kernel(spec)
    try:
        store(spec, kernel, directory, version)
    except OSError as error:
        warnings.warn(f"kernel cache: {error}; the kernel is not kept", stacklevel=2)
    return kernel


def compile_command(spec: KernelSpec, out: str = "kernels") -> str:
    """The command that compiles the kernels of this spec's layer into the folder ``out``."""
    shape = spec.shape
    words = [
        f"gcmoe compile --hidden {shape.hidden} --intermediate {shape.intermediate}",
        f"--experts {spec.num_experts} --top-k {shape.top_k}",
    ]
    if spec.clamp is not None:
        words.append(f"--clamp {spec.clamp!r}")
    words.append(f"--ranks {shape.num_ranks} --max-tokens {shape.max_tokens}")
    words.append(f"--dispatch-sms {spec.dispatch_ctas} --ring-slots {shape.num_slots}")
    words.append(f"--arch {spec.arch} --out {out}")
    if spec.trace:
        words.append("--trace")
    return " ".join(words)
