"""Programmatic dependent launch: a kernel starts while the one before it still runs and waits for
it inside, so that launching, and what needs no input, costs no time of its own.

A kernel takes part by a parameter `OVERLAPS: tl.constexpr` and a launch with `**OVERLAP`. It calls
`gdc_wait()` before it reads or writes anything that the kernel before it touches; weights may be
read ahead of that, and so may what was made two kernels ago or earlier: the kernel between has
waited for it. It calls `gdc_launch_dependents()`, behind its wait, when its own work is under way:
the next kernel starts then, and waits for its end all the same. Every program of a kernel must
wait, or what comes after it could overtake what came before it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

IS_NATIVE = not triton.knobs.runtime.interpret
OVERLAP: dict[str, bool] = {"OVERLAPS": IS_NATIVE} | ({"launch_pdl": True} if IS_NATIVE else {})

LINE_BYTES = tl.constexpr(64)  # the least that a prefetch is sure to bring


@triton.jit
def ask_for(ptrs):
    """Have these lines brought to the L2 cache. Nothing is read, so it may stand before the wait
    even if the kernel before writes there."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [ptrs],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def ask_for_rows(ptr, at_Z, is_there_Z, E: tl.constexpr):
    """The same of E elements from each of these places on, where there is something: many programs
    that ask for one and the same line make each other wait."""
    STEP: tl.constexpr = LINE_BYTES // (ptr.dtype.element_ty.primitive_bitwidth // 8)
    for start in tl.static_range(0, E, STEP):
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.s32 p, $2, 0;
            @p prefetch.global.L2 [$1];
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [ptr + at_Z + start, is_there_Z.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


__all__ = ["LINE_BYTES", "OVERLAP", "ask_for", "ask_for_rows", "gdc_launch_dependents", "gdc_wait"]
