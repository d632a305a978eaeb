"""Python imports this by itself in every process that has this folder on its PYTHONPATH."""

import breaks

breaks.when_imported()
