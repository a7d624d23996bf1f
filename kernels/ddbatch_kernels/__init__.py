"""Ops of the engine: PyTorch references now, Triton kernels later. Imports torch and triton only."""
