"""Who talks to whom: Attention groups, their senders and the one rank that is answered.

The FFN ranks form one tensor and expert parallel group (data parallel 1), so each of them needs
every row once. An Attention group is the `tp` consecutive Attention ranks that hold the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from afd_shim.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Topology:
    """A Attention ranks in groups of `attention_tp_size`, F FFN ranks; any ratio.

    Raises ConfigError for counts below 1, and where the last group would be incomplete: its rows
    would not reach every FFN rank, and the FFN's sums would be wrong.
    """

    num_attention_ranks: int
    num_ffn_ranks: int
    attention_tp_size: int = 1

    def __post_init__(self) -> None:
        for key in ("num_attention_ranks", "num_ffn_ranks", "attention_tp_size"):
            value = getattr(self, key)
            if value < 1:
                raise ConfigError(f"afd.{key}: {value}; at least 1 is needed.", key=key)
        if self.num_attention_ranks % self.attention_tp_size:
            raise ConfigError(
                f"afd.num_attention_ranks: {self.num_attention_ranks} is not a multiple of "
                f"Attention's tensor parallel size {self.attention_tp_size}; it is the sum of "
                f"data parallel x tensor parallel over all Attention servers.",
                key="num_attention_ranks",
            )

    @property
    def num_groups(self) -> int:
        """Attention groups: that many requests can be in flight."""
        return self.num_attention_ranks // self.attention_tp_size

    def group_of(self, attention_rank: int) -> int:
        """The group that `attention_rank` belongs to."""
        return attention_rank // self.attention_tp_size

    def ffn_ranks_fed_by(self, attention_rank: int) -> tuple[int, ...]:
        """The FFN ranks that `attention_rank` sends its group's rows to; may be none."""
        tp_rank = attention_rank % self.attention_tp_size
        return tuple(range(tp_rank, self.num_ffn_ranks, self.attention_tp_size))

    def sender(self, group: int, ffn_rank: int) -> int:
        """The Attention rank that sends `group`'s rows to `ffn_rank`."""
        return group * self.attention_tp_size + ffn_rank % self.attention_tp_size

    def is_answered(self, attention_rank: int) -> bool:
        """Whether FFN rank 0 answers this rank; the others of its group hold zeros."""
        return attention_rank % self.attention_tp_size == 0


def check_rank(role: str, rank: int, ranks: int) -> None:
    """ConfigError unless `rank` is one of the `ranks` that `role` was configured with."""
    if not 0 <= rank < ranks:
        key = "num_attention_ranks" if role == "attention" else "num_ffn_ranks"
        raise ConfigError(
            f"afd.{key}: {ranks}, so {role} rank {rank} has no place; give the number of {role} "
            f"ranks of all servers together.",
            key=key,
        )
