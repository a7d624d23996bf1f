"""How wrong a kernel may be in a dtype of two bytes, and arithmetic for those interpreted; no test.

Triton's interpreter cuts a bfloat16 off where a GPU rounds it, and multiplies the bit patterns of
two in a matrix product; its products are the host's, which on some machines adds the elements of a
row up in an order that depends on its place and its neighbours.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

ALLOWED = 1.5


def assert_no_worse(found: Tensor, expected: Tensor, truth: Tensor) -> None:
    """Of float64 `truth`, the kernel may be wrong by 1.5 times what its reference is wrong by
    in the root mean square, and by twice that at the worst element, which is one of few."""
    assert found.dtype == expected.dtype
    own, other = (found - truth).abs(), (expected - truth).abs()
    assert own.square().mean().sqrt() <= ALLOWED * other.square().mean().sqrt(), (own, other)
    assert own.max() <= 2 * ALLOWED * other.max(), (own.max(), other.max())


def mend_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test, let the interpreter, where there is one, compute as a GPU does."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def rounding(self, source, dtype):  # type: ignore[no-untyped-def]
        if source.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return cast(self, source, dtype)
        bits = np.ascontiguousarray(source.data, dtype=np.float32).view(np.int32)
        rounded = torch.from_numpy(bits).view(torch.float32).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)

    def dot_in_order(self, a, b, d, *_):  # type: ignore[no-untyped-def]
        if a.dtype.scalar == tl.bfloat16:
            a, b = cast(self, a, tl.float32), cast(self, b, tl.float32)
        wide_a, wide_b = (item.data.astype(d.data.dtype) for item in (a, b))
        total = np.zeros_like(d.data)
        for k in range(wide_a.shape[-1]):
            total += wide_a[..., :, k, None] * wide_b[..., k, None, :]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(builder, "cast_impl", rounding)
    monkeypatch.setattr(builder, "create_dot", dot_in_order)
