"""Reports on runs, read from their files: a page and a summary. Imports no torch."""
