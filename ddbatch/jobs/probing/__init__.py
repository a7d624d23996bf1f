"""Parts of job=probe."""
