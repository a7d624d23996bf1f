"""What bounds a round: the rule, in one place. Knows shares and nothing about how they came."""

from __future__ import annotations

# Below this share of every ceiling neither memory nor arithmetic is what a round waits for: it is
# launches, and kernels too short to fill the machine.
LATENCY_SHARE = 0.4


def sentence(memory: float, matmul: float, power: float | None) -> str:
    """The sentence that follows for an arm.

    memory: bytes a second of a round as a share of what a read or a copy moves. matmul: operations
    a second as a share of a matrix product's. power: watts as a share of their limit, None: not
    measured. The larger of the two shares names the bound (its floor is the longer one), unless
    both are below LATENCY_SHARE.
    """
    is_memory = memory >= matmul
    share, ceiling = max(memory, matmul), "memory bandwidth" if is_memory else "the matrix rate"
    bound = "latency" if share < LATENCY_SHARE else "memory" if is_memory else "compute"
    text = f"{bound}-bound: {100 * share:.0f}% of {ceiling}"
    return text if power is None else f"{text}, {100 * power:.0f}% of the power limit"
