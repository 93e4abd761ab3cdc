"""What the same seed gives again: on one device the same bits, in every way that gpukit feeds a training."""

import hashlib

import pytest
import torch
from torch import nn

import gpukit
from gpukit.machine.seeds import generator, seed_worker
from gpukit.training.pairs import ImagePairSet

SHAPE = (24, 3, 8, 8)


def pairs():
    draws = torch.Generator().manual_seed(3)
    inputs, targets = (torch.randint(256, SHAPE, dtype=torch.uint8, generator=draws) for _ in range(2))
    return ImagePairSet(inputs, targets, name="drawn")


class DrawnByWorkers(torch.utils.data.Dataset):
    """Samples that the process that prepares them draws: what workers change, if anything does."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.rand(3, 8, 8), index % 3


def bits(model):
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def trained(seed, device="cpu", *, deterministic=False, resident=True, workers=None, shuffle_seed=None):
    """The bits of a network with batch normalisation and dropout, trained for two epochs, and its last losses."""
    gpukit.seed_everything(seed, deterministic=deterministic)
    try:
        model = nn.Sequential(*gpukit.models.FalseColourNet(width=4).layers[:-1], nn.Dropout(0.2))
        history = gpukit.fit(
            model,
            gpukit.loader(
                pairs(), 7, device=device, shuffle=True, seed=seed if shuffle_seed is None else shuffle_seed,
                resident=resident, workers=workers,
            ),
            epochs=2, loss_fn=nn.MSELoss(), device=device, precision="fp32", progress=False,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        )  # fmt: skip
        return bits(model), [record.train_loss for record in history.epochs]
    finally:
        gpukit.seed_everything(0, deterministic=False)


@pytest.mark.parametrize(
    "options",
    [{}, {"deterministic": True}, {"resident": False, "workers": 0}, {"resident": False, "workers": 1}],
    ids=["resident", "deterministic", "no workers", "a worker"],
)
def test_the_same_seed_gives_the_same_bits_on_the_cpu(options):
    assert trained(1, **options) == trained(1, **options)


def test_workers_and_deterministic_algorithms_change_no_bit_on_the_cpu():
    """Order and augmentation come from (seed, epoch), not from who fetches the batch."""
    ways = [{}, {"deterministic": True}, {"resident": False, "workers": 0}, {"resident": False, "workers": 1}]
    assert len({trained(1, **way)[0] for way in ways}) == 1


def test_another_seed_gives_other_bits_and_so_does_another_order_alone():
    assert len({trained(1)[0], trained(2)[0], trained(1, shuffle_seed=2)[0]}) == 3


def first_epoch(workers, seed=5):
    gpukit.seed_everything(seed)
    loader = torch.utils.data.DataLoader(
        DrawnByWorkers(), batch_size=6, num_workers=workers, generator=generator(seed), worker_init_fn=seed_worker,
        multiprocessing_context="fork" if workers else None,
    )  # fmt: skip
    return torch.cat([images for images, _ in loader])


def test_what_workers_draw_is_the_same_again_and_depends_on_how_many_there_are():
    """Each worker has a stream of its own: one worker draws other numbers than two, or than the main process."""
    none, one, two = (first_epoch(workers) for workers in (0, 1, 2))
    assert torch.equal(one, first_epoch(1))
    assert torch.equal(two, first_epoch(2))
    assert not torch.equal(one, two)
    assert not torch.equal(none, one)
    assert len(two.unique()) > 0.99 * two.numel()


def test_the_number_of_threads_may_change_bits_and_the_seed_does_not_stop_it():
    """Sums are split over threads, and the parts rounded apart. The same number of threads gives the same bits."""
    numbers = torch.rand(300_000, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        sums = {}
        for threads in (1, 2):
            torch.set_num_threads(threads)
            sums[threads] = {numbers.sum().item() for _ in range(3)}
    finally:
        torch.set_num_threads(before)
    assert all(len(again) == 1 for again in sums.values())
    assert sums[1].pop() == pytest.approx(sums[2].pop(), rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
class TestOnAGpu:
    def test_the_same_seed_gives_the_same_bits_with_deterministic_algorithms(self):
        assert trained(1, "cuda", deterministic=True) == trained(1, "cuda", deterministic=True)

    def test_random_numbers_are_others_than_the_cpus_for_the_same_seed(self):
        torch.manual_seed(0)
        on_cpu = torch.rand(8)
        torch.manual_seed(0)
        assert not torch.equal(on_cpu, torch.rand(8, device="cuda").cpu())

    def test_the_order_of_a_loader_is_the_same_as_on_the_cpu(self):
        batches = {}
        for device in ("cpu", "cuda"):
            loader = gpukit.loader(pairs(), 5, device=device, shuffle=True, seed=3)
            batches[device] = torch.cat([x.cpu() for x, _ in loader])
        assert torch.equal(batches["cpu"], batches["cuda"])
