"""Facts about GPUs that the model of a layer stands on, each row with its sources."""

from __future__ import annotations

from dataclasses import dataclass

READ_SHARE = 0.917
"""Measured read rate over data-sheet rate of H200's HBM (4.40 of 4.80 TB/s), taken for the rest."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.

    Args:
        name: key in :data:`GPUS`.
        sms: streaming multiprocessors.
        hbm_peak: bytes a second, data sheet.
        read_rate: bytes a second that reading kernels reach.
        fp8_flops: dense FP8 operations a second of the whole GPU, data sheet.
        link_rate: bytes a second from the peers while as many go to them.
        decodes: weights are decoded by instructions (Hopper); False where the tensor core reads
            MXFP4 itself, so that only memory bounds the stream.
        sources: where the numbers come from.
    """

    name: str
    sms: int
    hbm_peak: float
    read_rate: float
    fp8_flops: float
    link_rate: float
    decodes: bool
    sources: str

    @property
    def column_ns(self) -> float:
        """Nanoseconds that one SM's tensor core needs for one token column of a unit of 256 x 256
        weights, at the data-sheet rate."""
        return 2 * 256 * 256 / (self.fp8_flops / self.sms) * 1e9


_HOPPER_FP8 = 1979e12
_LINK = 0.33e12
_TABLE = (
    Gpu(
        "H200", 132, 4.80e12, 4.40e12, _HOPPER_FP8, _LINK, True,
        "H200 SXM data sheet: 4.8 TB/s, 1,979 TFLOPS FP8 dense; read rate with 108 to 124 SMs and "
        "link rate with both directions busy measured on 2026-11-29",
    ),
    Gpu(
        "H100", 132, 3.35e12, READ_SHARE * 3.35e12, _HOPPER_FP8, _LINK, True,
        "H100 SXM data sheet: 3.35 TB/s, 1,979 TFLOPS FP8 dense; read rate as a share of the peak, "
        "and link rate (the same NVLink 4), from H200",
    ),
    Gpu(
        "H20", 78, 4.00e12, READ_SHARE * 4.00e12, 296e12, _LINK, True,
        "H20 data sheet: 78 SMs, 96 GB of HBM3 at 4.0 TB/s, 296 TFLOPS FP8 dense; read rate as a "
        "share of the peak, and link rate (the same NVLink 4), from H200",
    ),
    Gpu(
        "B200", 148, 8.00e12, READ_SHARE * 8.00e12, 4500e12, 2 * _LINK, False,
        "HGX B200 data sheet: 8 TB/s, 4,500 TFLOPS FP8 dense, 75 TFLOPS FP32, which is 148 SMs of "
        "128 lanes at 1.98 GHz; read rate as a share of the peak, and link rate (NVLink 5 is twice "
        "NVLink 4), from H200",
    ),
    Gpu(
        "B300", 148, 8.00e12, READ_SHARE * 8.00e12, 4500e12, 2 * _LINK, False,
        "HGX B300 data sheet: 8 TB/s, 4,500 TFLOPS FP8 dense, 75 TFLOPS FP32 as B200; the rates as "
        "for B200",
    ),
)  # fmt: skip
GPUS: dict[str, Gpu] = {gpu.name.lower(): gpu for gpu in _TABLE}
"""By name, in lower case."""


def get_gpu(name: str) -> Gpu:
    """The GPU called ``name``, in any case.

    Raises:
        ValueError: there is none; lists the names.
    """
    if name.lower() not in GPUS:
        raise ValueError(f"gpu = {name!r}: must be one of {', '.join(GPUS)}")
    return GPUS[name.lower()]
