"""Prompts in, completions out. Knows nothing about torch, models or the engine."""
