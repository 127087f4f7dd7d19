"""One layer of an operator: what a call checks, stores in the argument blocks, and launches."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from gcmoe.errors import CaptureError
from gcmoe.numerics import Packed
from gcmoe.protocol import Role
from gcmoe.runtime import checks
from gcmoe.runtime import device as devices


class SizedReplay:
    """The replay of a layer's calls of one size: argument blocks and graph.

    Args:
        op: the ``MoE``.
        size: one of its ``CallSize``.
        call, packed: of the layer.
    """

    def __init__(self, op: Any, size: Any, call: int, packed: Packed) -> None:
        blocks = op._arguments(size, call, packed)
        dispatch, finalize = blocks[Role.DISPATCH].fields, blocks[Role.FINALIZE].fields
        self._x, self._weights = dispatch["x"], dispatch["topk_weights"]
        self._ids = dispatch["topk_ids"], finalize["topk_ids"]
        self._num_tokens = dispatch["num_tokens"], finalize["num_tokens"]
        self._int64 = dispatch["ids_are_int64"], finalize["ids_are_int64"]
        self._y = finalize["y"]
        self._last: tuple[Any, ...] = ()
        self.graph = op._graph(size, blocks)

    def instantiate(self, values: tuple[Any, ...]) -> None:
        """Make the executable graph, with these values."""
        self._store(values)
        self.graph.instantiate()
        self._last = values

    def launch(self, values: tuple[Any, ...], stream: Any) -> None:
        """Launch the executable graph with these values."""
        if values != self._last:
            self._last = ()
            self._store(values)
            self.graph.update(Role.DISPATCH)
            self.graph.update(Role.FINALIZE)
            self._last = values
        self.graph.launch(stream)

    def capture(self, values: tuple[Any, ...], stream: Any) -> None:
        """Add the nodes, with these values, to the capture of a stream."""
        self._last = ()  # the executable graph does not get what the blocks get now
        self._store(values)
        self.graph.add_to_capture(stream)

    def _store(self, values: tuple[Any, ...]) -> None:
        """Put what a call brings into the argument blocks."""
        x, ids, weights, y, num_tokens, is_int64 = values
        self._x.value, self._weights.value, self._y.value = x, weights, y
        for side in (0, 1):
            self._ids[side].value = ids
            self._num_tokens[side].value = num_tokens
            self._int64[side].value = is_int64


class Layer:
    """One MoE layer: the operator with one set of weights. Made by ``MoE.bind``.

    Args:
        op: the ``MoE``; its kernels, argument blocks, record and order of replays serve all layers.
        packed: this rank's weights.
        call: id of the layer's calls in header words, modulo ``NUM_CALLS``.
    """

    def __init__(self, op: Any, packed: Packed, call: int) -> None:
        self.op = op
        self.packed = packed
        self.call = call
        config = op.config
        self._hidden, self._top_k, self._max_tokens = (
            config.hidden,
            config.top_k,
            config.max_tokens,
        )
        self._replays: dict[Any, SizedReplay] = {}
        with devices.guard(op.device), ExitStack() as made:
            for plan, size in op._sizes.items():
                self._replays[plan] = SizedReplay(op, size, call, packed)
                made.callback(self._replays[plan].graph.close)
            made.pop_all()
        self._by_size = tuple(
            (most, self._replays[op.plan.for_tokens(most)]) for most, _ in op.plan.tile_classes
        )
        self._is_instantiated = False

    def __call__(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """y = sum over slots of weight * expert(x), on the current stream.

        All ranks make the call, also with T = 0; T may differ. Never waits for the device. The
        first call of a layer instantiates its graphs, one for each class of sizes; later ones
        allocate nothing but y, and nothing with ``out``. Inside a graph capture it becomes one
        child graph; the operator must have been called eagerly before, on all ranks, and the
        tensors' addresses are captured.

        Args:
            x: bf16 [T, H], contiguous, T <= max_tokens.
            topk_ids: int32 or int64 [T, k], contiguous, ids in [0, E); an id outside is skipped.
            topk_weights: fp32 [T, k], contiguous.
            out: bf16 [T, H], contiguous, for y; may be ``x``, may not overlap the other two.

        Returns:
            bf16 [T, H]: ``out``, or a new tensor.

        Raises:
            TypeError, ValueError: a dtype, shape, device or layout is wrong; values are not read.
            CaptureError: in a capture, before any eager call of the operator.
            DeviceFault: an earlier call failed on the device; see :meth:`MoE.check`.
            OperatorClosed: after ``close()``.
        """
        op = self.op
        if op._closed or op._record.words[0]:
            op.check()
        index = op._index
        num_tokens = self._check(x, topk_ids, topk_weights, index)
        if out is None:
            out = torch.empty_like(x)
        else:
            shape = num_tokens, self._hidden
            checks.require_output(out, topk_ids, topk_weights, shape, self._max_tokens, op.device)
        if not devices.is_current(index):
            with devices.guard(op.device):
                return self._run(x, topk_ids, topk_weights, out, num_tokens)
        return self._run(x, topk_ids, topk_weights, out, num_tokens)

    def _run(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor, num_tokens: int
    ) -> Tensor:
        op = self.op
        values = (
            x.data_ptr(),
            topk_ids.data_ptr(),
            topk_weights.data_ptr(),
            out.data_ptr(),
            num_tokens,
            topk_ids.dtype is torch.int64,
        )
        replay = next(each for most, each in self._by_size if num_tokens <= most)
        handle = devices.stream_handle(op._index)
        order = op._order
        if devices.is_capturing():
            if not op._is_warm:
                raise CaptureError(
                    "call a layer of this operator once outside the capture, on all ranks, before "
                    "the first capture: kernels load and ranks meet in that call"
                )
            replay.capture(values, order.stream_object(handle))
            return out
        if not self._is_instantiated:
            for each in self._replays.values():
                each.instantiate(values)
            self._is_instantiated = True
        stream = order.enter(handle)
        replay.launch(values, stream)
        order.leave(handle, stream)
        op._is_warm = True
        return out

    def _check(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, index: int) -> int:
        """T; one chain of cheap comparisons, the message only when one fails."""
        try:
            num_tokens, hidden = x.shape
            slots = (num_tokens, self._top_k)
            id_type = topk_ids.dtype
            if (
                x.dtype is torch.bfloat16
                and hidden == self._hidden
                and num_tokens <= self._max_tokens
                and (id_type is torch.int32 or id_type is torch.int64)
                and topk_ids.shape == slots
                and topk_weights.dtype is torch.float32
                and topk_weights.shape == slots
                and x.is_contiguous()
                and topk_ids.is_contiguous()
                and topk_weights.is_contiguous()
                and x.get_device() == index
                and topk_ids.get_device() == index
                and topk_weights.get_device() == index
                and not x.data_ptr() % checks.ALIGNMENT
            ):
                return num_tokens
        except (AttributeError, ValueError):
            pass  # not a tensor, or not two dimensions
        raise checks.argument_error(
            x, topk_ids, topk_weights, self._hidden, self._top_k, self._max_tokens, self.op.device
        )
