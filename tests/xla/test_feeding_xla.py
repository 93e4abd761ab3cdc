"""Feeding and watching on XLA: batches are moved plainly, and a step's parts are really waited for."""

import torch

import gpukit


def test_prefetch_moves_the_batches_when_they_are_asked_for(xla):
    asked = []

    def batches():
        for number in range(3):
            asked.append(number)
            yield {"x": torch.full((2,), float(number))}

    epoch = iter(gpukit.prefetch(batches(), xla, ahead=2))
    assert next(epoch)["x"].device.type == "xla" and asked == [0]
    assert [batch["x"].cpu().tolist() for batch in epoch] == [[1.0, 1.0], [2.0, 2.0]]


def test_a_step_is_split_and_its_computing_is_not_put_off(xla):
    weights = torch.randn(700, 700).to(xla)
    kept = []

    def step(batch):
        result = weights
        for _ in range(4):
            result = result @ weights
        kept[:] = [result + batch.sum()]

    found = gpukit.time_feeding([torch.ones(4)] * 6, step, xla, batches=5)
    assert found.device == "xla:0" and found.shares["computing"] > 0.5


def test_the_process_is_watched(xla):
    with gpukit.watch_device(xla) as usage:
        torch.ones(10).to(xla).sum().item()
    assert usage.summary.ram_bytes.peak > 1e6 and usage.summary.gpus == ()
