"""Output of a plan: one screen of text, or JSON."""

from rich import box
from rich.table import Table
from rich.text import Text

from fsdp_trainer.apps.plan.device_plans import DevicePlans
from fsdp_trainer.apps.plan.show_groups import groups_json, groups_rows
from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.observe.console import duration, short
from fsdp_trainer.observe.terminal import Terminal
from fsdp_trainer.optim.schedules import steps_between
from fsdp_trainer.parallel.memory_check import gib
from fsdp_trainer.planning.plan.plan import GIB, RunPlan
from fsdp_trainer.planning.plan.rollout_cost import Rollouts, ScoredBy
from fsdp_trainer.planning.plan.second_model import list_bytes
from fsdp_trainer.planning.plan.suggest import Suggestion
from fsdp_trainer.planning.plan.time import HIDDEN

BAR = 32  # characters that represent the memory of the device
SHOWN = 0.0005  # of a step; parts of the budget that are less are not shown
NARROW = 110  # characters; a narrower terminal shows reasons below the overrides
GATHERING = ("shard", "copy", "eshard", "tensor")
"""Dimensions of the mesh along which tensors are gathered; along others they are exchanged."""
UNTIMED = "its speed is not in the table: set it with  plan.tflops=N"
COMPARED = "; GPU time below is compared as on an H100"


def as_json(cfg: PlanConfig, answer: DevicePlans) -> Json:
    """Return the plan for one kind of device.

    With several world sizes it is that of the smallest one that fits, else of the largest, and
    `worlds` lists all.
    """
    each = zip(answer.plans, answer.suggestions, answer.least_memory, strict=True)
    worlds = [
        one_world(cfg, *one) | {"uneven": uneven_json(cfg, uneven)}
        for one, uneven in zip(each, answer.uneven, strict=True)
    ]
    fitting = [plan.world_size for plan in answer.plans if plan.fits]
    several = {"smallest": min(fitting, default=None), "worlds": worlds} if len(worlds) > 1 else {}
    return {**worlds[answer.chosen], "assumed": answer.assumed, **several}


def one_world(
    cfg: PlanConfig,
    plan: RunPlan,
    suggestions: list[Suggestion],
    needs: Suggestion | None,
) -> Json:
    """Return the figures for one world size: GiB, seconds and bytes per rank, tokens of all ranks.

    needs: the changes with which a rank needs least memory. Times are null if the device's speed is
    unknown.
    """
    peak, timed = plan.memory.peak, plan.step_seconds
    steps, per_gpu = steps_of(cfg, plan), plan.tokens / plan.devices
    return {
        "fits": plan.fits,
        "gpu": plan.device.name,
        "memory_gib": round(plan.device.memory_gib, 2),
        "world_size": plan.world_size,
        "peak_gib": round(peak.total / GIB, 3),
        "moment": peak.phase,
        "moment_detail": peak.when,
        "by_category": {name: round(size / GIB, 3) for name, size in peak.bytes.items()},
        "moments": {moment.phase: round(moment.total / GIB, 3) for moment in plan.memory.moments},
        "moments_by_category": {
            moment.phase: {name: round(size / GIB, 3) for name, size in moment.bytes.items()}
            for moment in plan.memory.moments
        },
        "host_gib": round(plan.memory.host / GIB, 3),
        "host_gib_per_node": round(plan.host_bytes_per_node / GIB, 3),
        "disk_gib": round(plan.memory.disk / GIB, 3),
        "host_fits": plan.host_fits,
        "rollouts": rollouts_json(plan.rollouts),
        "groups": groups_json(cfg, plan),
        "empty_rows_share": round(plan.empty_share, 4),
        "micro_batches": plan.micro_batches,
        "rehearsed": plan.rehearsed,
        "bytes_per_step": round(sum(plan.bytes_sent.values())),
        "bytes_by_link": {name: round(sent) for name, sent in plan.bytes_sent.items()},
        "bytes_sent": sent_json(plan),
        "bytes_across_nodes": {name: round(wire.across) for name, wire in plan.wire.items()},
        "step_seconds": timed,
        "reference": reference_of(cfg),
        "list_bytes": list_bytes(cfg.objective),
        "slowest_step": plan.slow.figures if timed else None,
        "fastest_step": plan.fast.figures if timed else None,
        "budget": budget_json(plan),
        "work": {name: round(size) for name, size in plan.slow.work.items()},
        "tokens_per_second": plan.tokens / plan.seconds if timed else None,
        "tokens_per_second_range": [plan.tokens / s for s in timed[::-1]] if timed else None,
        "tokens_per_second_per_gpu": per_gpu / plan.seconds if timed else None,
        "tokens_per_second_per_gpu_range": [per_gpu / s for s in timed[::-1]] if timed else None,
        "mfu_palm": [plan.mfu(s) for s in timed[::-1]] if timed else None,
        "steps": steps,
        "days": [steps * s / 86400 for s in timed] if timed and steps else None,
        "checkpoint_gib": round(plan.checkpoint / GIB, 3),
        "checkpoint_seconds": round(plan.checkpoint_seconds, 2),
        "least_memory": suggestion_json(needs) if needs else None,
        "suggestions": [suggestion_json(s) | {"why": s.reason} for s in suggestions],
    }


def sent_json(plan: RunPlan) -> dict[str, int]:
    return {name: round(sent) for name, sent in plan.bytes_sent.items() if sent}


def budget_json(plan: RunPlan) -> dict[str, list[float]] | None:
    if plan.step_seconds is None:
        return None
    fast, slow = plan.fast.budget, plan.slow.budget
    return {name: [fast[name], slow[name]] for name in fast}


def rollouts_json(rollouts: Rollouts | None) -> Json | None:
    """Return the figures of a step's generated answers; None without generation."""
    if rollouts is None:
        return None
    return {
        "answers": rollouts.answers,
        "at_once": rollouts.at_once,
        "weights_gib": round(rollouts.weights / GIB, 3),
        "cache_gib": round(rollouts.cache / GIB, 3),
        "seconds": rollouts.seconds,
        "ranks": rollouts.ranks,
        "stored_gib": round(rollouts.stored / GIB, 3),
        "reward_models": [
            {
                "reward": one.title,
                "weights_gib": round(one.weights / GIB, 3),
                "seconds": one.seconds,
            }
            for one in rollouts.scored
        ],
    }


def reference_of(cfg: PlanConfig) -> str | None:
    """Return the kind of the objective's reference: `base` of adapters, `stored`, or None."""
    second = cfg.second_model
    if second is None or second.role != "reference":
        return None
    return "stored" if second.mode == "stored" else "base"


def uneven_json(cfg: PlanConfig, uneven: RunPlan | None) -> Json | None:
    """Return the figures that differ if one rank's experts get more rows than those of the others.

    uneven: the plan with plan.expert_load; None if experts are not divided among ranks.
    """
    if uneven is None:
        return None
    return {
        "expert_load": cfg.plan.expert_load,
        "fits": uneven.fits,
        "peak_gib": round(uneven.peak_bytes / GIB, 3),
        "step_seconds": uneven.step_seconds,
    }


def suggestion_json(suggestion: Suggestion) -> Json:
    peak = round(suggestion.peak_bytes / GIB, 3)
    return {"override": suggestion.override, "peak_gib": peak, "cost": suggestion.cost}


def steps_of(cfg: PlanConfig, plan: RunPlan) -> int | None:
    """Return the number of steps of the run; None if it depends on the size of the data."""
    if cfg.plan.tokens:
        return round((cfg.train.epochs or 1) * cfg.plan.tokens / plan.tokens)
    return cfg.train.steps


def show(cfg: PlanConfig, config: ModelConfig, answer: DevicePlans) -> None:
    """Print the plan for one kind of device.

    With several world sizes a table of all comes first, then the smallest that fits, else the
    largest.
    """
    console = Terminal()
    plan = answer.plans[answer.chosen]
    suggestions = answer.suggestions[answer.chosen]
    show_head(console, cfg, config, answer.assumed)
    if len(answer.plans) > 1:
        console.print(worlds(answer.plans))
    console.print(verdict(plan))
    console.print(categories(plan))
    uneven = answer.uneven[answer.chosen]
    console.print(figures(cfg, plan, uneven, compares=bool(suggestions)))
    if plan.step_seconds:
        console.print(budget(plan))
    if suggestions:
        console.print(title_of(plan))
        console.print(table_of(suggestions, narrow=console.width < NARROW))
    elif not plan.fits:
        console.print(
            "Nothing that a configuration can change makes it fit: a smaller model, or a device "
            "with more memory, is needed."
        )
    if smallest := answer.least_memory[answer.chosen]:
        with_changes = f" with  {smallest.override}" if smallest.override else ""
        about = plan.at_least or "about "
        memory = f"{about}{smallest.peak_bytes / GIB:,.1f} GiB"
        console.print(f"The least memory of a device that would do here: {memory}{with_changes}")


def show_head(console: Terminal, cfg: PlanConfig, config: ModelConfig, assumed: list[str]) -> None:
    size = short(config.parameters())
    model = cfg.model.name if cfg.model.name != "auto" else cfg.model.init_from or config.family
    step = f"{counted(cfg.batch.rows, 'row')} × {cfg.batch.seq_len:,} tokens a step"
    console.print(f"{model}, {size} parameters: {step}")
    for line in assumed:
        console.print(Text(f"assumed: {line}", "dim"))


def title_of(plan: RunPlan) -> Text:
    title = "faster, and would fit" if plan.fits else "what would make it fit"
    basis = "as planned from this rehearsal" if plan.rehearsed else "if the lower bound is the peak"
    return Text.assemble((title, "bold"), (f", {basis}", "dim"))


def yes_or_no(plan: RunPlan) -> Text:
    """Return `yes`, `no`, or `maybe` where only a lower bound fits, in colour."""
    if not plan.fits:
        return Text("no", "red")
    return Text("yes", "green") if plan.rehearsed else Text("maybe", "yellow")


def worlds(plans: list[RunPlan]) -> Table:
    table = Table(
        "ranks",
        "peak",
        "fits",
        "step",
        "tokens/s",
        "a GPU",
        "wire a step",
        "empty",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    for column in table.columns:
        column.justify = "right"
    for plan in plans:
        rate = plan.tokens / plan.seconds
        timed = (
            (f"{plan.seconds:.2f} s", short(rate), short(rate / plan.world_size))
            if plan.step_seconds
            else ("–",) * 3
        )
        sent = sum(plan.bytes_sent.values())
        table.add_row(
            f"{plan.world_size:,}",
            f"{plan.peak_bytes / GIB:,.1f} GiB",
            yes_or_no(plan),
            *timed,
            f"{sent / GIB:,.1f} GiB",
            Text(f"{plan.empty_share:.0%}", "red" if plan.empty_share >= 0.1 else ""),
        )
    return table


def verdict(plan: RunPlan) -> Text:
    ranks = f"{plan.world_size:,}"
    on_host = f"{counted(plan.world_size, 'rank')} on this machine"
    devices = {"any": counted(plan.world_size, "device"), "cpu": on_host}
    where = devices.get(plan.device.name, f"{ranks} × {plan.device.name}")
    peak = f"{plan.at_least}{plan.peak_bytes / GIB:,.1f} of {plan.device.memory_gib:,.1f} GiB"
    answer, style = ("fits", "bold green") if plan.fits else ("does not fit", "bold red")
    if plan.fits and not plan.rehearsed:
        answer, style = "may fit", "bold yellow"
    return Text.assemble((answer, style), f": {peak} on each of {where}")


def categories(plan: RunPlan) -> Table:
    peak = plan.memory.peak
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    small = peak.total - peak.bytes["allowance"] < GIB

    def size_text(size: float, style: str = "") -> Text:
        text = f"{size / 2**20:,.1f} MiB" if small else f"{size / GIB:,.2f} GiB"
        return Text(text, style, justify="right")

    for name, size in peak.bytes.items():
        bar = round(BAR * size / max(plan.memory_bytes, peak.total))
        table.add_row(f"  {name}", size_text(size), Text("━" * bar, "cyan"))
    table.add_row("  peak", size_text(peak.total, "bold"), Text(peak.when, "dim"))
    if plan.memory.host:
        table.add_row("  host", size_text(plan.memory.host), Text(host_line(plan), "dim"))
    if plan.memory.disk:
        ranks = min(plan.world_size, plan.device.per_node)
        of_node = f"{plan.memory.disk * ranks / GIB:,.0f} GiB a node"
        text = f"of files of states, each rank: {of_node}, read and written once a step"
        table.add_row("  disk", size_text(plan.memory.disk), Text(text, "dim"))
    return table


def host_line(plan: RunPlan) -> str:
    held = f"of the host's memory, each rank: {plan.host_bytes_per_node / GIB:,.0f} GiB a node"
    if plan.host_fits:
        return held
    return f"{held}, pinned: more than {plan.host_limit_gib:,.0f} GiB, which many nodes do not have"


def figures(cfg: PlanConfig, plan: RunPlan, uneven: RunPlan | None, compares: bool) -> Table:
    """Return a table of times, messages, duration of the run and checkpoints.

    uneven: the plan with plan.expert_load; compares: True if suggestions with times are printed
    after it.
    """
    table = Table.grid(padding=(0, 2))
    count = "one micro-batch" if plan.micro_batches == 1 else f"{plan.micro_batches} micro-batches"
    rows = [("wire", f"{wires(plan)}, each rank and step of {count}")]
    if plan.rollouts:
        rows.append(("answers", rollouts_line(cfg, plan, plan.rollouts)))
        rows += [("reward", reward_line(plan, one)) for one in plan.rollouts.scored]
    elif plan.empty_share:
        fills = f"batch.rows={plan.computed_rows} fills them, in the same time"
        rows.append(("empty", f"{plan.empty_share:.0%} of the rows that ranks compute: {fills}"))
    if timed := plan.step_seconds:
        size, unit = (1, "s") if timed[1] >= 1 else (1000, "ms")
        rows.append(("step", f"{size * timed[0]:.2f} – {size * timed[1]:.2f} {unit}"))
        if reference_of(cfg) == "stored":
            read = f"{size * plan.fast.reading:.2f} – {size * plan.slow.reading:.2f} {unit}"
            read += " for as many rows as a step has"
            rows.append(("reference", f"{read}: it reads all rows of an epoch once, before step 1"))
        rows += [("speed", speed(plan, *timed)), ("run", length(cfg, plan))]
    else:
        rows.append(("step", UNTIMED + COMPARED * compares))
    if uneven:
        rows.append(("uneven", uneven_line(cfg, uneven)))
    rows += [*lists(cfg), ("checkpoint", checkpoints(cfg, plan)), *groups_rows(cfg, plan)]
    for name, text in rows:
        table.add_row(Text(f"  {name}", "dim"), text)
    return table


def budget(plan: RunPlan) -> Table:
    """Return a table of what a step spends its time on, most time first."""
    table = Table.grid(padding=(0, 2))
    fast, slow = plan.fast.budget, plan.slow.budget
    size, unit = (1, "s") if plan.slow.step >= 1 else (1000, "ms")
    for name in sorted(slow, key=lambda name: (name == HIDDEN, -slow[name])):
        if slow[name] >= SHOWN * plan.slow.step:
            share = (fast[name] + slow[name]) / 2 / plan.seconds
            seconds = f"{size * fast[name]:.2f} – {size * slow[name]:.2f} {unit}"
            cells = (Text(text, justify="right") for text in (seconds, f"{share:.0%}"))
            table.add_row(Text(f"    {name}", "dim"), *cells)
    return table


def lists(cfg: PlanConfig) -> list[tuple[str, str]]:
    """Return the row on the disk space of a teacher's stored lists, if there are any."""
    size, tokens = list_bytes(cfg.objective), cfg.plan.tokens
    if not size:
        return []
    text = f"{size:,} bytes of disk for each supervised token"
    if tokens:
        text += f", {gib(size * tokens)} if all {short(tokens)} are supervised"
    return [("lists", f"{text}; the teacher reads them once, before step 1, and is not in memory")]


def rollouts_line(cfg: PlanConfig, plan: RunPlan, rollouts: Rollouts) -> str:
    """Return the cost of generating the answers of a step, and the assumptions about them."""
    ranks = rollouts.ranks
    where = f"each of {counted(ranks, 'rank')} of their own" if ranks else "a rank"
    weights = f"{gib(rollouts.stored)} for their part of the weights, and " if ranks else ""
    text = (
        f"{rollouts.answers:,} a step, {rollouts.at_once:,} at once on {where}: {weights}"
        f"{gib(rollouts.weights)} of weights and {gib(rollouts.cache)} of cache while they are made"
    )
    if plan.step_seconds:
        joint = "beside" if cfg.objective.ahead and (ranks or cfg.objective.server) else "plus"
        fast, slow = rollouts.seconds
        text += f", {fast:.1f} – {slow:.1f} s, {joint} the step below"
    turns = cfg.objective.most_turns
    answer = f"{cfg.objective.max_new_tokens:,} tokens" + (
        f" in {turns} turns" if turns > 1 else ""
    )
    return f"{text} (all of {answer}; then {plan.rows:,} rows)"


def reward_line(plan: RunPlan, one: ScoredBy) -> str:
    text = f"{one.title}: {gib(one.weights)} of weights on each rank"
    if plan.step_seconds:
        fast, slow = one.seconds
        text += f", {fast:.2f} – {slow:.2f} s to score the answers, plus the step below"
    return text


def uneven_line(cfg: PlanConfig, uneven: RunPlan) -> str:
    text = f"{cfg.plan.expert_load:g} × the even rows at one rank's experts: "
    text += f"{uneven.peak_bytes / GIB:,.1f} GiB"
    if timed := uneven.step_seconds:
        size, unit = (1, "s") if timed[1] >= 1 else (1000, "ms")
        text += f", {size * timed[0]:.2f} – {size * timed[1]:.2f} {unit}"
    return text if uneven.fits else f"{text}; it does not fit then"


def speed(plan: RunPlan, shortest: float, longest: float) -> str:
    """Return tokens per second and MFU. shortest, longest: seconds of a step."""
    slow, fast = plan.tokens / longest, plan.tokens / shortest
    each = f"{slow / plan.devices:,.0f} – {fast / plan.devices:,.0f} tokens/s a GPU"
    mfu = f"MFU {plan.mfu(longest):.0%} – {plan.mfu(shortest):.0%}"
    return f"{each}, {short(slow)} – {short(fast)} in all; {mfu}"


def wires(plan: RunPlan) -> str:
    """Return the bytes that a rank sends, by dimension of the mesh."""
    parts = []
    for name, wire in plan.wire.items():
        if wire.ranks > 1:
            sent = gib(plan.bytes_sent[name])
            gathers = wire.gathered and name in GATHERING
            gathered = f" ({gib(wire.gathered)} gathered)" if gathers else ""
            across = f", {gib(wire.across)} between nodes" if wire.across else ""
            parts.append(f"{name} × {wire.ranks}: {sent}{gathered}{across}")
    return "; ".join(parts) or "nothing"


def length(cfg: PlanConfig, plan: RunPlan) -> str:
    steps = steps_of(cfg, plan)
    if steps is None or plan.step_seconds is None:
        return "depends on the data: set  plan.tokens=N  or  train.steps=N"
    days = [steps * seconds / 86400 for seconds in plan.step_seconds]
    fast, slow = (f"{day:,.1f} days" if days[0] >= 2 else duration(day * 86400) for day in days)
    return f"{fast} – {slow} for {counted(steps, 'step')}, {short(steps * plan.tokens)} tokens"


def checkpoints(cfg: PlanConfig, plan: RunPlan) -> str:
    rate = f"{plan.device.disk / 1e9:g} GB/s a node"
    size = f"{gib(plan.checkpoint)}, {plan.checkpoint_seconds:,.0f} s at {rate}"
    every = steps_between(cfg.checkpoint.every, steps_of(cfg, plan))
    if not every or plan.step_seconds is None:
        return size
    if cfg.checkpoint.mode == "async":
        return f"{size}, behind training, every {every:,} steps"
    lost = plan.checkpoint_seconds / (every * plan.seconds + plan.checkpoint_seconds)
    return f"{size}, every {every:,} steps: {lost:.1%} of the time"


def table_of(suggestions: list[Suggestion], narrow: bool) -> Table:
    """Return a table of overrides with peak, cost and reason.

    narrow: True to show the reason below the override.
    """
    table = Table(
        "override",
        "peak",
        "GPU time",
        *([] if narrow else ["why"]),
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    table.columns[0].overflow = "fold"  # never cut: the user types it
    for column in table.columns[1:3]:
        column.justify, column.no_wrap = "right", True
    for option in suggestions:
        override, reason = Text(option.override, "bold"), Text(option.reason, "dim")
        figures = f"{option.peak_bytes / GIB:,.1f} GiB", cost_text(option.cost)
        if narrow:
            table.add_row(Text("\n").join([override, reason]), *figures)
        else:
            table.add_row(override, *figures, reason)
    return table


def cost_text(cost: float) -> str:
    """Format the additional GPU time per token: 0.25 → +25%."""
    return f"{cost:+.0%}" if abs(cost) >= 0.005 else "same"
