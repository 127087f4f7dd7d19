"""The workspace of an operator and its fault record in host memory."""

from __future__ import annotations

import ctypes
import socket
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcmoe.errors import GCMoEError, UnsupportedDevice
from gcmoe.protocol import WorkspaceShape
from gcmoe.protocol.faults import RECORD_BYTES
from gcmoe.protocol.workspace import LINE
from gcmoe.runtime import driver
from gcmoe.runtime.group import RankGroup, store_limit

RENDEZVOUS_LIMIT_S = 60.0
_FORMATS = {4: "I", 8: "Q"}


@dataclass(frozen=True, slots=True)
class Stats:
    """What a rank received since its operator was created or reset.

    Args:
        rows: int64 [EL] on the CPU, rows routed to each local expert.
        bad_ids: expert ids of E and more that this rank met and masked.
    """

    rows: Tensor
    bad_ids: int


@dataclass
class RendezvousCount:
    """Rendezvous that this package has begun in this process, for all its operators.

    torch numbers the symmetric-memory rendezvous of a process over all groups. Where one rank has
    made one more, the next of both waits for a key that the other never writes.
    """

    made: int = 0

    def require_equal(self, group: RankGroup) -> None:
        """Raises GCMoEError on all ranks when the ranks have made different numbers."""
        counts = group.gather(self.made)
        for rank, count in enumerate(counts):
            if count != counts[0]:
                raise GCMoEError(
                    f"symmetric memory: rank 0 has made {counts[0]} rendezvous for operators in "
                    f"its process, rank {rank} {count}. torch numbers them per process, so the "
                    f"next one would wait for ever. All ranks must create their operators of more "
                    f"than one rank in the same order; restart the processes"
                )


rendezvous_count = RendezvousCount()


class Workspace:
    """Device memory of one rank, and where the other ranks' workspaces are mapped here.

    One rank takes ordinary device memory, several take symmetric memory; multicast is never used.
    Creation is collective. Peers may access it from their first call on, so no rank makes one
    before all have passed :meth:`reset_cells` and a barrier.

    Attributes:
        buffer: uint8 [num_bytes], zeroed.
        address: of ``buffer`` on the device.
        peers: R device addresses in rank order; this rank's is ``address``.
        offset: of the workspace in its symmetric segment; must be equal on all ranks.
    """

    def __init__(self, shape: WorkspaceShape, device: torch.device, group: RankGroup) -> None:
        self.shape = shape
        self.handle: Any = None
        self.offset = 0
        if group.size == 1:
            room = torch.zeros(shape.num_bytes + LINE, dtype=torch.uint8, device=device)
            skip = -room.data_ptr() % LINE
            self.buffer = room[skip : skip + shape.num_bytes]
            self.address = self.buffer.data_ptr()
            self.peers = [self.address]
        else:
            # A rank that has no memory must not leave the others waiting in the rendezvous.
            group.together("allocating symmetric memory", lambda: self._allocate(device))
            rendezvous_count.require_equal(group)
            group.together("mapping the workspaces of the peers", lambda: self._map_peers(group))
        if self.address % LINE:
            raise GCMoEError(f"the workspace lies at {self.address:#x}: not a multiple of {LINE}")

    def _allocate(self, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        size = self.shape.num_bytes
        self.buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=device)

    def _map_peers(self, group: RankGroup) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        assert group.group is not None
        rendezvous_count.made += 1
        try:
            with store_limit(RENDEZVOUS_LIMIT_S):
                self.handle = symmetric_memory.rendezvous(self.buffer, group=group.group)
        except RuntimeError as error:
            raise GCMoEError(rendezvous_text(error, group)) from error
        self.offset = int(getattr(self.handle, "offset", 0))
        self.address = self.buffer.data_ptr()
        self.peers = [int(pointer) + self.offset for pointer in self.handle.buffer_ptrs]
        if self.peers[group.rank] != self.address:
            raise GCMoEError(
                f"symmetric memory maps this rank at {self.peers[group.rank]:#x}, the buffer lies "
                f"at {self.address:#x}"
            )
        self.buffer.zero_()

    def view(self, region: str) -> torch.Tensor:
        """A region as uint8 [num_bytes], sharing memory.

        Raises:
            KeyError: the workspace has no such region.
        """
        place = self.shape.region(region)
        return self.buffer[place.offset : place.offset + place.num_bytes]

    def reset_cells(self, generation: int, epoch: int, arrivals: int) -> None:
        """Cells as before a first replay; enqueued on the current stream.

        Args:
            generation, epoch, arrivals: as in ``WorkspaceShape.initial_cells``.
        """
        values = self.shape.initial_cells(generation, epoch, arrivals)
        for region in self.shape.regions:
            if not region.is_cell:
                continue
            cells = values.get(region.name)
            if cells is None or not any(cells):
                self.view(region.name).zero_()
                continue
            packed = bytearray(struct.pack(f"<{len(cells)}{_FORMATS[region.item_bytes]}", *cells))
            if len(packed) != region.num_bytes:
                raise GCMoEError(f"{region.name}: {len(packed)} bytes for {region.num_bytes}")
            self.view(region.name).copy_(torch.frombuffer(packed, dtype=torch.uint8))

    def close(self) -> None:
        """Drop the memory; this rank's replays have ended and peers start none."""
        self.handle = None
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.peers = []


def rendezvous_text(error: Exception, group: RankGroup) -> str:
    """What to say of a rendezvous that failed."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    is_timeout = type(error).__name__ == "DistStoreError" or "timeout" in str(error).lower()
    if not is_timeout:
        return f"symmetric memory: the rendezvous of {group.size} ranks failed: {text}"
    return (
        f"symmetric memory: rank {group.rank} waited in vain for the other ranks in a rendezvous: "
        f"{text}. torch numbers the rendezvous of a process over all groups: a rank that has made "
        f"one more or one less than the others, in this package or elsewhere, is not found. All "
        f"ranks must make all their rendezvous in the same order; or a rank has ended"
    )


class HostRecord:
    """The fault record: host memory that kernels write and the host reads at any time.

    Args:
        num_bytes: a multiple of 8; other records than that of faults have other sizes.

    Attributes:
        words: its 32-bit words; word 0 is the kind, 0 for no fault.
        device_address: for kernels.
    """

    def __init__(self, num_bytes: int = RECORD_BYTES) -> None:
        cu = driver.cu
        self._num_bytes = num_bytes
        flags = cu.CU_MEMHOSTALLOC_DEVICEMAP | cu.CU_MEMHOSTALLOC_PORTABLE
        self._address = int(driver.call("cuMemHostAlloc", num_bytes, flags))
        try:
            self.words = (ctypes.c_uint32 * (num_bytes // 4)).from_address(self._address)
            self.clear()
            self.device_address = int(driver.call("cuMemHostGetDevicePointer", self._address, 0))
        except Exception:
            self.close()
            raise

    def clear(self) -> None:
        ctypes.memset(self._address, 0, self._num_bytes)

    def read(self) -> tuple[int, ...]:
        return tuple(self.words)

    def close(self) -> None:
        """Free the memory; no kernel may write it any more."""
        if self._address:
            self.words = (ctypes.c_uint32 * (self._num_bytes // 4))()
            driver.call("cuMemFreeHost", self._address)
            self._address = 0


def device_identity(device: torch.device) -> tuple[str, str]:
    """(host name, GPU uuid)."""
    return socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)


def require_peer_atomics(device: torch.device, identities: list[tuple[str, str]]) -> None:
    """The GPUs of the group that this process sees are peers of ``device`` with native atomics.

    GPUs that are hidden from this process, and those of other hosts, are taken on trust.

    Args:
        identities: :func:`device_identity` of every rank's GPU, in rank order.

    Raises:
        UnsupportedDevice: one is not; names it.
    """
    cu = driver.cu
    visible = {
        device_identity(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())
    }
    own = driver.call("cuDeviceGet", device.index)
    attributes = cu.CUdevice_P2PAttribute
    needs = {
        "peer access": attributes.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED,
        "native peer atomics": attributes.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
    }
    for rank, identity in enumerate(identities):
        index = visible.get(identity)
        if index is None or index == device.index:
            continue
        peer = driver.call("cuDeviceGet", index)
        for name, attribute in needs.items():
            if not driver.call("cuDeviceGetP2PAttribute", attribute, own, peer):
                raise UnsupportedDevice(
                    f"{name} between the GPUs of all ranks are required; GPU {device.index} has "
                    f"none to GPU {index} of rank {rank}"
                )
