"""Ranks of one host: whole runs through shared memory, or CUDA IPC, have the bits of workers as threads."""

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from tests.engine.rank_case import CASES, run_rank

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


def run_two(*arguments):
    start_processes(run_rank, args=arguments, nprocs=2, start_method="spawn")


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_have_the_bits_of_two_threads(tmp_path, late):
    run_two(str(tmp_path), tuple(CASES), "cpu", late)


def test_two_processes_that_share_no_memory_have_the_bits_of_two_threads(tmp_path):
    run_two(str(tmp_path), ("zero-1", "zero-2", "zero-3", "1f1b"), "cpu", False, 0, True)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("type_", [pytest.param("gpu", marks=on_gpu)])
def test_two_processes_on_one_gpu_have_the_bits_of_two_threads(tmp_path, type_, late):
    """1F1B, DDP, zero-bubble and tied weights, audited, with random delays of host and device on all lanes."""
    run_two(str(tmp_path), tuple(CASES), type_, late)
