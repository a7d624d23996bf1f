"""Ready slots take inert rows."""

from ddbatch_kernels.admit.reference import Ready, admit_ref
from ddbatch_kernels.rows import Rows


def admit(rows: Rows, ready: Ready) -> None:
    """Seat ready slots on inert rows, in the order of the ring and of the rows, in place."""
    if rows.slot_B.is_cuda:
        from ddbatch_kernels.admit.kernel import admit_triton  # only a GPU needs Triton

        admit_triton(rows, ready)
    else:
        admit_ref(rows, ready)


__all__ = ["Ready", "admit", "admit_ref"]
