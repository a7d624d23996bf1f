"""How kernels find the slot of a row. Knows nothing about what slots hold."""

import triton
import triton.language as tl


@triton.jit
def slot_of(slot_ptr, row, num_slots):
    """The slot of a row, or of many; one that is none is not looked up. slot_ptr None: the row's
    own number."""
    slot = row
    if slot_ptr is not None:
        slot = tl.minimum(tl.maximum(tl.load(slot_ptr + row), 0), num_slots - 1)
    return slot
