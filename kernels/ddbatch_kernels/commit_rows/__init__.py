"""The books of a round: its record, and its rows and slots afterwards."""

from ddbatch_kernels.commit_rows.reference import Kept, Record, commit_rows_ref
from ddbatch_kernels.rows import Accepted, Nodes, Rows, Slots


def commit_rows(
    nodes: Nodes,
    accepted: Accepted,
    rows: Rows,
    slots: Slots,
    record: Record,
    *,
    page: int,
    max_len: int,
    trash_cell: int,
) -> Kept:
    """Write the record, then slots and rows, and say which cells the kept nodes' keys belong to.
    max_len: tokens that the pages of a slot hold; page: tokens a page."""
    if rows.slot_B.is_cuda:
        from ddbatch_kernels.commit_rows.kernel import commit_rows_triton  # needs Triton

        op = commit_rows_triton
    else:
        op = commit_rows_ref
    return op(
        nodes, accepted, rows, slots, record, page=page, max_len=max_len, trash_cell=trash_cell
    )


__all__ = ["Kept", "Record", "commit_rows", "commit_rows_ref"]
