"""Ops of the engine, as PyTorch references. Imports torch and triton only."""
