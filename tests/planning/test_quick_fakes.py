"""Results of operators without storage are those of torch's own mode, also the second time."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_trainer.planning.plan.quick_fakes import QuickFakeMode

aten = torch.ops.aten


def in_mode(mode, operation):
    """Return what can be seen of two results of an operation, and what they share."""
    with mode:
        given = torch.empty(4, 6, 8, dtype=torch.bfloat16).transpose(0, 1)
        other = torch.empty(8, 1)
        results = [operation(given, other) for _ in range(2)]
        memory = [each.untyped_storage() for each in (given, other, *results)]
        forms = [(r.shape, r.stride(), r.dtype, r.device, r.storage_offset()) for r in results]
    names = [storage._cdata for storage in memory]
    return forms, [storage.nbytes() for storage in memory], [names.index(name) for name in names]


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: x.detach()[1:, ::2].permute(2, 0, 1),
        lambda x, y: x.select(1, 2).unsqueeze(0).expand(3, 6, 8),
        lambda x, y: aten._unsafe_view.default(x, [6, 4, 2, 4]),
        lambda x, y: x.reshape(24, 8),
        lambda x, y: x.contiguous().view(-1).as_strided((3, 2), (1, 5), 4),
        lambda x, y: x @ y.to(torch.bfloat16),
        lambda x, y: x + y[:, 0],
        lambda x, y: x.mul(2.5),
        lambda x, y: torch.where(y > 0, y, 1).sum(0, keepdim=True),
        lambda x, y: torch.cat([y, y.t().t()], dim=1),
        lambda x, y: torch.empty_like(x, memory_format=torch.contiguous_format),
        lambda x, y: x.add_(1),
        lambda x, y: y.to(torch.float64),
        lambda x, y: torch.tensor([1.0, 2.0]),
    ],
)
def test_a_result_is_that_of_torchs_own_mode(operation):
    ours, torchs = QuickFakeMode(), FakeTensorMode(allow_non_fake_inputs=True)
    assert in_mode(ours, operation) == in_mode(torchs, operation)
    assert in_mode(ours, operation) == in_mode(torchs, operation)


def test_a_view_fills_no_second_memory_and_a_wrong_one_is_refused():
    with QuickFakeMode():
        one = torch.empty(2, 3)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="invalid for input of size 6"):
                one.view(7)
            with pytest.raises(RuntimeError, match="Attempting to broadcast"):
                one + torch.empty(2, 4)
