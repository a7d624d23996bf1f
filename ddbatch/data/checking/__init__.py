"""A run read again: what must hold of every part."""
