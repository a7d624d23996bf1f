"""Programmatic dependent launch: a kernel starts while the one before it still runs and waits for
it inside, so that launching, and what needs no input, costs no time of its own.

A kernel takes part by a parameter `OVERLAPS: tl.constexpr` and a launch with `**OVERLAP`. It calls
`gdc_wait()` before it reads or writes anything that an earlier kernel touches; weights may be read
ahead of that. It calls `gdc_launch_dependents()` when its own work is under way: the next kernel
starts then, and waits for its end all the same. Every program of a kernel must wait, or what comes
after it could overtake what came before it.
"""

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

IS_NATIVE = not triton.knobs.runtime.interpret
OVERLAP: dict[str, bool] = {"OVERLAPS": IS_NATIVE} | ({"launch_pdl": True} if IS_NATIVE else {})

__all__ = ["OVERLAP", "gdc_launch_dependents", "gdc_wait"]
