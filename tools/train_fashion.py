"""Train a network on Fashion-MNIST and write its weights, in minutes on a GPU.

    python tools/train_fashion.py MODEL [--data DIR] --out FILE.safetensors [--epochs N] [--size PX]

Needs PyTorch and NumPy (with ml-dtypes), and src on the path, which this script sees to. All data
lies on the device as bytes and is augmented there. The schedule is one cosine with a warm-up; seeds
are fixed, though GPUs add in an order of their own. Matrices are written in float16, and the last
accuracy is that of the weights as written.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from lowbit.models import checkpoint, fashion
from lowbit.models.catalog import ResNet34, ViTB, ViTS

TEST_BATCH = 1000
SMOOTHING = 0.1


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: the learning rate is that of its batch, at its highest."""

    model: type
    epochs: int
    batch: int
    rate: float
    decay: float
    sgd: bool
    mixup: float  # of Beta(mixup, mixup); 0 is none
    warmup: float  # share of all steps


RECIPES = {
    "resnet34": Recipe(ResNet34, 25, 512, 0.2, 5e-4, True, 0.0, 0.1),
    "vit_s_16": Recipe(ViTS, 60, 512, 7e-4, 0.1, False, 0.2, 0.1),
    "vit_b_16": Recipe(ViTB, 40, 512, 4e-4, 0.1, False, 0.2, 0.1),
}


class Images:
    """Images and labels on a device, and what is made of them: resized, normalized, augmented."""

    def __init__(self, part: str, options: argparse.Namespace, device: torch.device) -> None:
        images, labels = fashion.fashion(part, options.data)
        self.images = torch.tensor(images[: options.limit], device=device)
        self.labels = torch.tensor(labels[: options.limit], device=device, dtype=torch.int64)
        self.resizing = torch.tensor(fashion.resizing(options.size), device=device)
        self.last = torch.channels_last if options.model == "resnet34" else torch.contiguous_format

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, chosen: Tensor | slice, augment: bool) -> tuple[Tensor, Tensor]:
        """float32 [batch, 3, size, size] and labels."""
        grey = self.images[chosen].float()[:, None] / 255
        if augment:
            grey = augmented(grey)
        grey = (grey - fashion.MEAN) / fashion.DEVIATION
        grey = self.resizing @ grey @ self.resizing.T
        pixels = grey.expand(-1, 3, -1, -1).contiguous(memory_format=self.last)
        return pixels, self.labels[chosen]

    def batches(self, size: int) -> Iterator[Tensor]:
        """The images' indices in random order, without a last, shorter batch."""
        order = torch.randperm(len(self), device=self.images.device)
        yield from order[: len(order) // size * size or None].split(size)


def augmented(grey: Tensor) -> Tensor:
    """Mirrored, moved by up to two pixels, scaled by up to a tenth, a square of it erased."""
    n, _, side, _ = grey.shape

    def even(low: float, high: float) -> Tensor:
        return torch.empty(n, device=grey.device).uniform_(low, high)

    scale, reach = even(0.9, 1.1), 2 * 2 / side
    theta = torch.zeros(n, 2, 3, device=grey.device)
    theta[:, 0, 0] = scale * torch.where(even(0, 1) < 0.5, -1.0, 1.0)
    theta[:, 1, 1] = scale
    theta[:, 0, 2], theta[:, 1, 2] = even(-reach, reach), even(-reach, reach)
    grid = nn.functional.affine_grid(theta, list(grey.shape), align_corners=False)
    grey = nn.functional.grid_sample(grey, grid, align_corners=False)
    at = torch.arange(side, device=grey.device)
    half = torch.where(even(0, 1) < 0.5, even(2, 5), 0.0)[:, None]
    rows = (at - even(0, side)[:, None]).abs() < half
    columns = (at - even(0, side)[:, None]).abs() < half
    return grey.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)


def optimizer_of(network: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """SGD or AdamW; vectors (norms, biases) do not decay."""
    matrices = [p for p in network.parameters() if p.dim() > 1]
    vectors = [p for p in network.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if recipe.sgd:
        return torch.optim.SGD(groups, recipe.rate, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, recipe.rate, betas=(0.9, 0.99))


def cosine(step: int, steps: int, warmup: float) -> float:
    """The share of the highest learning rate: a line up, then half a cosine down to nothing."""
    first = max(1, round(steps * warmup))
    if step < first:
        return (step + 1) / first
    return 0.5 + 0.5 * math.cos(math.pi * (step - first) / max(1, steps - first))


def loss_of(network: nn.Module, pixels: Tensor, labels: Tensor, mixup: float) -> Tensor:
    """Cross-entropy with smoothed labels, of images mixed in pairs if `mixup`
    (Zhang et al. 2017, arXiv:1710.09412)."""
    if not mixup:
        return nn.functional.cross_entropy(network(pixels), labels, label_smoothing=SMOOTHING)
    share = torch.distributions.Beta(mixup, mixup).sample().item()
    mixed = network(pixels.lerp(pixels.flip(0), 1 - share))
    own = nn.functional.cross_entropy(mixed, labels, label_smoothing=SMOOTHING)
    other = nn.functional.cross_entropy(mixed, labels.flip(0), label_smoothing=SMOOTHING)
    return share * own + (1 - share) * other


@torch.inference_mode()
def accuracy(network: nn.Module, test: Images) -> float:
    """The share of test images that are classified as labelled."""
    network.eval()
    right = torch.zeros((), dtype=torch.int64, device=test.images.device)
    for start in range(0, len(test), TEST_BATCH):
        pixels, labels = test.batch(slice(start, start + TEST_BATCH), augment=False)
        right += (network(pixels).argmax(1) == labels).sum()
    return right.item() / len(test)


def train(options: argparse.Namespace, recipe: Recipe, device: torch.device) -> nn.Module:
    """The trained network; prints a line an epoch, corrects options.epochs."""
    torch.manual_seed(options.seed)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    data, test = (Images(part, options, device) for part in ("train", "test"))
    network = recipe.model().network(fashion.CLASSES, options.size)
    network = network.to(device, memory_format=data.last)
    optimizer = optimizer_of(network, recipe)
    batch = min(options.batch or recipe.batch, len(data))
    per_epoch = len(data) // batch
    begin = time.perf_counter()
    epochs, epoch, step, before = options.epochs, 0, 0, 0.0
    while epoch < epochs:
        epoch += 1
        network.train()
        total = torch.zeros((), device=device)
        for chosen in data.batches(batch):
            pixels, labels = data.batch(chosen, augment=True)
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate * cosine(step, per_epoch * epochs, recipe.warmup)
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(network, pixels, labels, recipe.mixup)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0 if not recipe.sgd else 5.0)
            optimizer.step()
            step += 1
            total += loss.detach()
        # Before the clock is read: what the device still has to do.
        mean = total.item() / per_epoch
        with torch.autocast(device.type, torch.bfloat16):
            found = accuracy(network, test)
        seconds = time.perf_counter() - begin
        print(f"{epoch:3}/{epochs}  loss {mean:.4f}  test {found:.2%}  {seconds:.0f} s", flush=True)
        if epoch == 2 and options.minutes:
            left = (options.minutes * 60 - seconds) / (seconds - before)
            epochs = max(3, min(epochs, 2 + int(left)))
        before = seconds
    options.epochs = epochs
    return network


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", choices=list(RECIPES))
    parser.add_argument("--data", default=fashion.FOLDER, help="folder of the four .gz files")
    parser.add_argument("--out", required=True, help="file to write, .safetensors")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--size", type=int, help="pixels of an image's side")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--limit", type=int, help="images of each part, to try the script")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, help="fewer epochs if the second says more")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    recipe = RECIPES[options.model]
    options.epochs = options.epochs or recipe.epochs
    options.size = options.size or recipe.model().accuracy_size
    device = torch.device(options.device)
    begin = time.perf_counter()
    network = train(options, recipe, device)
    state = checkpoint.halved(network.state_dict())
    made = (
        f"{options.model} trained on Fashion-MNIST at {options.size} pixels, "
        f"{options.epochs} epochs, seed {options.seed}"
    )
    checkpoint.save(options.out, state, made)
    network.load_state_dict(checkpoint.load(options.out))
    found = accuracy(network, Images("test", options, device))
    size = Path(options.out).stat().st_size / 1e6
    seconds = time.perf_counter() - begin
    print(f"{options.out}: {made}; test {found:.2%}, {size:.1f} MB, {seconds:.0f} s")


if __name__ == "__main__":
    main()
