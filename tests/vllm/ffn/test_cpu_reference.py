"""The torch reference of expert mapping and recording, against counting by hand."""

import torch

from afd_shim.ffn.cpu_reference import count_physical_experts, own_experts, physical_expert_ids


def test_choices_of_other_ranks_run_an_own_expert_and_weigh_nothing() -> None:
    """The kernel corrupts memory for ids outside its own experts, so every id is one of them."""
    expert_map = torch.tensor([-1, -1, 0, 1], dtype=torch.int32)
    ids = torch.tensor([[0, 2], [3, 1], [-1, 2]], dtype=torch.int32)

    local, weights = own_experts(ids, torch.full((3, 2), 0.5), expert_map, 2)

    assert local.dtype == torch.int32
    assert local.tolist() == [[0, 0], [1, 1], [0, 0]]
    assert weights.tolist() == [[0, 0.5], [0.5, 0], [0, 0.5]]


def test_replicas_are_chosen_by_the_row_as_vllm_s_kernel_does() -> None:
    """Every replica is one of the expert's own, chosen by the multiplicative hash of the row."""
    to_physical = torch.tensor([[0, 4, -1], [1, -1, -1], [2, 3, 5]])
    replicas = torch.tensor([2, 1, 3])
    logical = torch.tensor([[0, 1, 2]] * 50, dtype=torch.int32)

    physical = physical_expert_ids(logical, to_physical, replicas)

    for row in range(50):
        hashed = (row * 2654435769) % 2**32
        assert physical[row].tolist() == [[0, 4][hashed % 2], 1, [2, 3, 5][hashed % 3]]


def test_ids_of_no_expert_stay_nobody_s() -> None:
    """Padding rows may carry any id; they must neither index out of the map nor run an expert."""
    physical = physical_expert_ids(torch.tensor([[-1, 7]]), torch.tensor([[0], [1]]), torch.tensor([1, 1]))

    assert physical.tolist() == [[-1, -1]]


def test_only_real_rows_are_counted() -> None:
    """Rows behind `real_rows` are padding or placeholders; counts are added to what is there."""
    load = torch.tensor([10, 0, 0, 0], dtype=torch.int32)

    count_physical_experts(torch.tensor([[0, 1], [1, 3], [2, 2]]), 2, load)

    assert load.tolist() == [11, 2, 0, 1]
