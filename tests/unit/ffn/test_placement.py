"""What the placement log says, and that it can be read back."""

from pathlib import Path

from afd_shim.ffn.placement import (
    LayerPlacement,
    Rearrangement,
    balancedness,
    expected_load,
    format_placement,
    load_per_rank,
    read_rearrangements,
)

# Four experts and two redundant ones on two ranks; expert 0 is hot, and gets a second replica.
LAYER = LayerPlacement(layer=3, before=[0, 1, 2, 3, 2, 3], after=[0, 1, 2, 0, 3, 1], load=[90, 10, 5, 5, 5, 5])
RECORD = Rearrangement(number=1, step=40, seconds=0.25, num_ranks=2, layers=[LAYER])


def test_load_is_summed_over_each_rank_s_share_of_the_slots() -> None:
    """Ranks hold equal, consecutive shares of the physical experts."""
    assert load_per_rank(LAYER.load, 2) == [105, 15]


def test_expected_load_shares_an_expert_s_tokens_between_its_replicas() -> None:
    """Tokens of all old replicas count, and the new ones share them evenly; none is lost."""
    expected = expected_load(LAYER)

    assert expected == [45, 5, 10, 45, 10, 5]
    assert sum(expected) == sum(LAYER.load)


def test_balancedness_is_mean_over_maximum() -> None:
    """It is 1 in perfect balance, and where nothing was recorded."""
    assert balancedness([105, 15]) == 60 / 105
    assert balancedness([7, 7]) == 1
    assert balancedness([0, 0]) == 1


def test_words_name_what_each_rank_holds_what_is_replicated_and_the_recorded_load() -> None:
    """One line per layer and rank, as the requirement asks."""
    assert list(format_placement(RECORD)) == [
        "rearrangement 1 after 40 steps, 0.25 s, 1 layers changed",
        "layer 3: balancedness 0.57 -> 1.00",
        "layer 3 rank 0: experts 0 1 2 (replicated: 0 1), 105 tokens before, 60 expected",
        "layer 3 rank 1: experts 0 1 3 (replicated: 0 1), 15 tokens before, 60 expected",
    ]


def test_records_are_found_among_a_server_s_other_lines(tmp_path: Path) -> None:
    """The log holds vLLM's prefix and lines of other kinds; the records come back equal, in order."""
    log = tmp_path / "ffn.log"
    second = Rearrangement(number=2, step=80, seconds=0.5, num_ranks=2, layers=[])
    log.write_text(
        "(Worker pid=7) INFO 12-01 00:00:00 [eplb.py:1] AFD: serving 4 MoE layers\n"
        f"(Worker pid=7) INFO 12-01 00:00:00 [eplb.py:1] {RECORD.log_line()}\n"
        f"(Worker pid=7) INFO 12-01 00:00:01 [eplb.py:1] {second.log_line()}\n"
    )

    assert read_rearrangements(log) == [RECORD, second]


def test_a_record_that_another_process_s_line_has_cut_costs_no_other(tmp_path: Path) -> None:
    """The ranks of a server share its log; a report of the other rearrangements is still due."""
    log = tmp_path / "ffn.log"
    line = RECORD.log_line()
    log.write_text(f"{line[:60]}(Worker pid=8) INFO 12-01 00:00:00 something else\n{line[60:]}\n{line}\n{line[:90]}")

    assert read_rearrangements(log) == [RECORD]
