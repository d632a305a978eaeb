"""Reports of what happened in runs, read from their files: a page and a summary. No torch."""
