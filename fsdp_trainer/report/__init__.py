"""What happened in a run, or in many: read from their files, on a page and at the terminal. Imports no torch."""
