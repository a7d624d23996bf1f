"""A clean data set of finished runs: order, filter, formats, files."""
