"""The transfer of weights from the training ranks to the rollout ranks."""

import torch
from torch.distributed.tensor import DTensor

from fsdp_trainer.base.distributed import local_part, local_slice
from fsdp_trainer.checkpoint.state import weights
from fsdp_trainer.launch.rollout_link import RolloutLink
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.optim.offload.weight_copies import weights_changed


@torch.no_grad()
def send_weights(model: Decoder, link: RolloutLink, device: torch.device) -> None:
    """Send all trained weights, one after the other. Collective of the training ranks.

    device: the one that computes.
    """
    for weight in weights(model).values():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if link.number == 0:
            link.broadcast(whole.to(device).contiguous())


@torch.no_grad()
def receive_weights(model: Decoder, link: RolloutLink, device: torch.device) -> None:
    for weight in weights(model).values():
        whole = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        link.broadcast(whole)
        local_part(weight).copy_(whole[local_slice(weight)])
    weights_changed(model)
