"""A rank that only generates rollouts, while others train (launch.rollout_ranks)."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import gather
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import Batch, Sharding, TrainConfig
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.launch.rollout_link import END, FAILED, RolloutLink
from fsdp_trainer.launch.world import World
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.from_config.setup import ModelSetup
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.parallel.convert import precompute_float8_scales
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.rl.rounds.rank_rounds import SentWork, go_key, ready_key, result_key, work_key
from fsdp_trainer.rl.rounds.round_makers import RoundMakers
from fsdp_trainer.rl.rounds.rounds import RoundMaker, RoundResult
from fsdp_trainer.rl.serving.weight_transfer import receive_weights
from fsdp_trainer.run.build import build_model
from fsdp_trainer.training.setup.run_inputs import RunInputs
from fsdp_trainer.training.setup.run_setup import RunSetup
from fsdp_trainer.training.stopping.stop import StopSignals
from fsdp_trainer.training.weights import fill

WAIT_SECONDS = 1.0
"""Seconds between two exchanges among the rollout ranks on whether there is work."""


class Ended(Exception):
    """The training ranks have ended. Raised on all rollout ranks together."""


def generate_as_rank(
    cfg: TrainConfig,
    model_setup: ModelSetup,
    inputs: RunInputs,
    world: World,
    link: RolloutLink,
    run: Path,
    signals: StopSignals,
    observer: Observer,
) -> int:
    """Run rounds of generation until training ends; return the exit code. Collective.

    world: of the rollout ranks alone.
    """
    optim = replace(cfg.optim, offload="none")
    cfg = replace(cfg, sharding=sharding_of_generators(cfg.sharding), optim=optim)
    layout = Layout(cfg.sharding, world.size, Batch())
    try:
        if layout.problem:
            raise UserError("the rollout ranks do not divide", [layout.problem])
        dims = Dims(layout, world.device.type, parse_duration(cfg.launch.timeout))
        setup = RunSetup(cfg, inputs, model_setup, world, dims, False, run, signals, observer, link)
        makers = RoundMakers.of(setup)
        model = generating_model(setup)
        serve(setup, model, makers.on_ranks(model), link)
    except Ended:
        pass
    except (RunFailed, UserError) as error:
        if world.main:
            link.put(FAILED, error)
    link.wait_for(END, parse_duration(cfg.launch.timeout))
    return link.end_code()


def sharding_of_generators(training: Sharding) -> Sharding:
    """Return how the rollout ranks hold the model: one copy, in parts."""
    return replace(training, strategy="fsdp", replicas=1, context=1, cpu_offload=False)


def generating_model(setup: RunSetup) -> Decoder:
    """Return this rank's part of the model. Collective.

    Frozen weights are read where the run began; trained ones come with each round.
    """
    model = build_model(setup, setup.cfg.objective.temperature)
    allocate(model, setup.device)
    if not all(parameter.requires_grad for parameter in model.parameters()):
        fill(model, setup.model_setup.source, setup.cfg.precision.param_dtype)
    return model


def serve(setup: RunSetup, model: Decoder, maker: RoundMaker, link: RolloutLink) -> None:
    """Run one round after the other. Raises Ended, RunFailed and UserError. Collective."""

    def check() -> None:
        if any(gather(link.has(END))):
            raise Ended

    for number in count(1):
        phases.enter("data", number)
        wait_for(work_key(number), link, check)
        sent: SentWork = link.get(work_key(number))
        link.count(ready_key(number), 1)
        wait_for(go_key(number), link, check)  # the training ranks may stop before
        receive_weights(model, link, setup.device)
        precompute_float8_scales(model, setup.cfg.precision)
        if sent.forgets:
            maker.forget()
        phases.enter("rollouts")
        result: RoundResult | RunFailed | UserError
        try:
            maker.play(sent.work, check)
            result = maker.judge()
        except (RunFailed, UserError) as error:  # from an environment or a reward, on all ranks
            result = error
        if setup.world.main:
            link.put(result_key(number), result)


def wait_for(key: str, link: RolloutLink, check: Callable[[], None]) -> None:
    """Wait until all rollout ranks see a value. Collective. check: as in `serve`."""
    while not all(gather(link.wait_for(key, WAIT_SECONDS))):
        check()
