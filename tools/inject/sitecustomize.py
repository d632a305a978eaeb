"""Hook that Python imports automatically in every process with this folder on its PYTHONPATH."""

import breaks

breaks.when_imported()
