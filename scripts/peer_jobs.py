"""Whole jobs with timm alone, as its own training and inference scripts make them; what `bench_jobs.py` compares with.

    python scripts/peer_jobs.py train PHOTOS --model vit_tiny_patch16_224 --out weights.pth
    python scripts/peer_jobs.py predict PHOTOS/val --model vit_tiny_patch16_224 --checkpoint weights.pth --out rows.csv

timm's data sets, transforms, loaders with their prefetcher, networks and optimizers, in plain loops. `train` makes
epochs over PHOTOS/train at one rate with AdamW, scores PHOTOS/val in float32, and saves the weights. `predict` writes
the five likeliest classes of each image. Nothing of vitlab is imported, so that start-up is timm's own; the imports
stand at the top, as in timm's scripts.
"""

import argparse
import csv
from contextlib import nullcontext
from typing import Any

import torch
from timm.data import create_dataset, create_loader
from timm.data.transforms_factory import create_transform
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.utils import AverageMeter, accuracy
from torch import nn
from torchvision.transforms import v2

BORDER = 4
"""Pixels around small images, out of which training crops them."""


def main() -> None:
    """Do the job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["train", "predict"])
    parser.add_argument("data", help="folder with train and val, or of any images")
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="timm's name (%(default)s)")
    parser.add_argument("--image_size", type=int, default=224, help="(%(default)s)")
    parser.add_argument("--patch_size", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--num_classes", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--batch_size", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=5e-4, help="(%(default)s)")
    parser.add_argument("--weight_decay", type=float, default=0.05, help="(%(default)s)")
    parser.add_argument("--min_scale", type=float, default=0.25, help="smallest crop's share of the area (%(default)s)")
    parser.add_argument("--interpolation", default="bicubic", help="(%(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--amp", action="store_true", help="autocast to bf16")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    parser.add_argument("--checkpoint", default="", help="weights to predict with")
    parser.add_argument("--out", required=True, help="file for the weights or the rows")
    args = parser.parse_args()
    torch.manual_seed(0)
    network = create_model(
        args.model,
        num_classes=args.num_classes,
        img_size=args.image_size,
        patch_size=args.patch_size,
        checkpoint_path=args.checkpoint,
    ).to(args.device)
    if args.job == "train":
        train(args, network)
    else:
        predict(args, network.eval())


def transform_of(
    image_size: int,
    *,
    is_training: bool,
    min_scale: float,
    interpolation: str,
    use_prefetcher: bool = True,
    crop_share: float = 0.9,
) -> Any:
    """Give timm's transform; small images get DeiT's crop out of a border in place of the resized one."""
    transform = create_transform(
        image_size,
        is_training=is_training,
        use_prefetcher=use_prefetcher,
        color_jitter=None,
        interpolation=interpolation,
        crop_pct=crop_share,
        scale=(min_scale, 1.0),
    )
    if is_training and image_size <= 64:
        transform.transforms[0] = v2.RandomCrop(image_size, padding=BORDER, padding_mode="reflect")
    return transform


def loader_of(args: argparse.Namespace, dataset: Any, *, is_training: bool) -> Any:
    """Give timm's loader, which normalises on the device."""
    loader = create_loader(
        dataset,
        input_size=(3, args.image_size, args.image_size),
        batch_size=args.batch_size,
        is_training=is_training,
        num_workers=args.workers,
        device=torch.device(args.device),
    )
    dataset.transform = transform_of(
        args.image_size, is_training=is_training, min_scale=args.min_scale, interpolation=args.interpolation
    )
    return loader


def train(args: argparse.Namespace, network: nn.Module) -> None:
    """Train, score once, and save the weights."""
    loader, val = (
        loader_of(args, create_dataset("", args.data, split=split), is_training=split == "train")
        for split in ("train", "val")
    )
    optimizer = create_optimizer_v2(network, opt="adamw", lr=args.lr, weight_decay=args.weight_decay)
    loss_of = nn.CrossEntropyLoss()
    device = torch.device(args.device)
    context = torch.autocast(device.type, torch.bfloat16) if args.amp else nullcontext()
    for epoch in range(args.epochs):
        network.train()
        losses = AverageMeter()
        for images, labels in loader:
            with context:
                loss = loss_of(network(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.update(loss.item(), len(images))
        network.eval()
        scores = AverageMeter()
        with torch.inference_mode():
            for images, labels in val:
                scores.update(accuracy(network(images), labels)[0].item(), len(images))
        print(f"epoch {epoch}: train loss {losses.avg:.4f}, val top-1 {scores.avg:.2f}", flush=True)
    torch.save(network.state_dict(), args.out)


def predict(args: argparse.Namespace, network: nn.Module) -> None:
    """Write a row for each image."""
    dataset = create_dataset("", args.data)
    loader = loader_of(args, dataset, is_training=False)
    probabilities = []
    with torch.inference_mode():
        for images, _ in loader:
            probabilities.append(network(images).softmax(-1).cpu())
    best, classes = torch.cat(probabilities).topk(min(5, args.num_classes))
    with open(args.out, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", *(f"{name}_{place + 1}" for place in range(best.shape[1]) for name in ("label", "p"))])
        for path, shares, labels in zip(dataset.filenames(), best.tolist(), classes.tolist(), strict=True):
            rows.writerow([path, *(cell for pair in zip(labels, shares, strict=True) for cell in pair)])


if __name__ == "__main__":
    main()
