"""Offline batch generation: exact speculative decoding with DFlash drafters and DDTree trees."""

__version__ = "0.1.0"
