"""The static-batch engine. Knows nothing about text, files or options."""
