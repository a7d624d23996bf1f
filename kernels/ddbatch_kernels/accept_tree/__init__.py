"""The accepted path of each row."""

from ddbatch_kernels.accept_tree.reference import AcceptedPath, accept_tree_ref

accept_tree = accept_tree_ref

__all__ = ["AcceptedPath", "accept_tree", "accept_tree_ref"]
