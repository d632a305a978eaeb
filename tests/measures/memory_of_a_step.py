"""Peak memory and messages of a training step, measured beside the plan."""

from unittest.mock import patch

import torch
import torch.distributed as dist
from layouts import layout_of

from fsdp_trainer.base.live_bytes import LiveBytes
from fsdp_trainer.models.attention import DocumentAttention
from fsdp_trainer.models.decoder import MediaInputs, MicroBatch
from fsdp_trainer.models.from_config.initialize import initialize_weights
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.optim.optimizers import build_optimizer
from fsdp_trainer.parallel import gloo_messages
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.parallelize import Computation, parallelize
from fsdp_trainer.planning.rehearse.step_recorder import StepRecorder
from fsdp_trainer.training.gradients import clip_gradients
from fsdp_trainer.training.objective import CrossEntropy


def micro_step(model, batch):
    """Run forward and backward of a micro-batch."""
    model(batch, CrossEntropy(batch.weights))[0].backward()


def whole_batch(cfg):
    """Return a micro-batch of full rows of which all tokens are supervised."""
    rows, length = cfg.batch.micro_rows, cfg.batch.seq_len
    lengths = [[length - length // 4, length // 4]] * rows
    layout = DocumentAttention(lengths, length, torch.device("cpu"))
    places = torch.zeros(rows, length, dtype=torch.int64)
    return MicroBatch(
        places, places, layout, places.flatten(), places.flatten(), torch.ones(rows * length)
    )


def steps_with_images(cases):
    """Return this rank's peak bytes in a step with images, and what it gathers and reduces.

    cases: (cfg, config, arrays of one image, its tokens).
    """
    dist.init_process_group("gloo")
    # the plan names FSDP2's own messages, in place of which gloo is sent others
    with patch.object(gloo_messages, "is_gloo", lambda _group: False):
        return [_step_with_images(*case) for case in cases]


def _step_with_images(cfg, config, arrays, tokens):
    cpu = torch.device("cpu")
    dims = Dims(layout_of(cfg), "cpu", timeout=60)
    model = parallelize(meta_decoder(config), dims, Computation.of(cfg), freeze=cfg.train.freeze)
    allocate(model, cpu)
    initialize_weights(model, 0)
    model.fill_buffers()
    optimizer = build_optimizer(model, cfg.optim)
    batch = whole_batch(cfg)
    batch.tokens[0, :tokens] = model.tower.token

    def compute():
        # as in training, only the batch holds the pixels
        own = {name: value.clone() for name, value in arrays.items()}
        positions = batch.positions[None].repeat(3, 1, 1)
        batch.media = MediaInputs(own, tokens, positions if "image_grid_thw" in own else None)
        micro_step(model, batch)

    with StepRecorder() as recorder:
        compute()
    optimizer.step()
    optimizer.zero_grad()
    with LiveBytes() as measure:
        for parameter in model.parameters():
            for tensor in (parameter.detach(), *optimizer.state[parameter].values()):
                measure.add(tensor)
        compute()
        clip_gradients(model, dims, 1.0, None)
    sent = {
        op: sum(one.sent for one in recorder.collectives if one.op == op)
        for op in ("all_gather", "reduce_scatter")
    }
    return measure.most, sent
