"""Where the rows are: files in every form, read by row_id, and the log that pins them."""
