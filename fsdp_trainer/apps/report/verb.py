"""The verb `report`: write the page, print the summary."""

import json
from pathlib import Path

from fsdp_trainer.apps.report.page import write
from fsdp_trainer.apps.report.read import read_sources
from fsdp_trainer.apps.report.rollout_page import write_rollouts
from fsdp_trainer.apps.report.run_summary import Summary, show
from fsdp_trainer.config.verbs import ReportConfig
from fsdp_trainer.observe.terminal import Terminal


def report(cfg: ReportConfig) -> int:
    """Write the page or print the figures, and return the exit code.

    Raises UserError for a source that holds no run, and if the page cannot be written.
    """
    sources = [cfg.source] if isinstance(cfg.source, str) else cfg.source or []
    summaries = [Summary(run) for run in read_sources(sources)]
    out = Path(cfg.out or (Path(sources[0]) if len(sources) == 1 else Path()) / "report.html")
    rollouts = None
    if cfg.out or cfg.format == "text":
        rollouts = write_rollouts(summaries, out)
        write(summaries, out, rollouts.name if rollouts else None)
    if cfg.format == "json":
        print(json.dumps([summary.figures() for summary in summaries], indent=1))
        return 0
    show(summaries, Terminal())
    print(f"\npage: {out}")
    if rollouts:
        print(f"rollouts: {rollouts}")
    return 0
