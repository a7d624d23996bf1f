"""Model families read from Hugging Face folders. Knows nothing about rows, trees or files of
prompts.
"""
