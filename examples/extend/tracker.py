"""A tracker: a table that spreadsheets open, with a line for each step.

    fsdp-trainer +recipe=quickstart 'logging.trackers=[tracker.py:Table]'

from this folder. `Table.log` is called once for each step, also over restarts. After a step that is
taken back a new object for another `run.name` gets all steps; with `takes_back = True` the same one
would get the step again.
"""

import csv

import fsdp_trainer


class Table(fsdp_trainer.Tracker):
    """Appends to NAME.csv in the run's folder."""

    def __init__(self, run):
        """Called at each start of the run."""
        super().__init__(run)
        self.file = (run.folder / f"{run.name}.csv").open("a", newline="")
        if run.is_new:
            self.file.write(f"# lr {run.config['optim']['lr']}\n")

    def log(self, values, step):
        """Called with the numbers of metrics.jsonl."""
        csv.writer(self.file).writerow([step, values.get("loss"), values["lr"]])
        self.file.flush()

    def close(self, exit_code):
        """Called at the end, or when the run stops to be resumed."""
        self.file.close()
