"""The draft tree of each row."""

from ddbatch_kernels.build_tree.reference import TreeNodes, build_tree_ref, tree_capacity

build_tree = build_tree_ref

__all__ = ["TreeNodes", "build_tree", "build_tree_ref", "tree_capacity"]
