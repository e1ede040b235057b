"""`vitlab explain`: what a network looks at in images, as pictures and as arrays in a folder.

For image number 3 of 12, `photos/cat.jpg`, the folder gets

    03-cat.png            the image, its class and probability; the main maps over it
    03-cat-attention.png  a row of maps for each chosen layer: its mean, then its heads or groups
    03-cat.npz            the values: `gradient`, `rollout`, `surprisal`, a `(heads, H, W)` for each layer, ...

and for the network itself `network.npz`, `reach.png` and, where it has a table of positions, `positions.png`. Maps are
as fine as the network's own positions at that layer.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from vitlab.checks import require
from vitlab.data.datasets import files_split
from vitlab.data.images import ImageError, list_images
from vitlab.data.loader import Batch, Loader
from vitlab.data.preprocess import EvalTransform
from vitlab.disk import replacing
from vitlab.engine.figures import Picture, image_grid, save_image
from vitlab.errors import InputError, unknown_name
from vitlab.inference.attention_maps import AttentionLayer, attention_layers, attention_maps, last_of_each
from vitlab.inference.attribution import gradient_map, surprisal, to_pixels
from vitlab.inference.overlays import positions_picture, reach_picture, tiles
from vitlab.inference.reach import kinds_of_reach, position_similarity
from vitlab.models.files import ModelFile
from vitlab.models.imagegpt import ImageGPT
from vitlab.models.network import device_of
from vitlab.models.timm_network import TimmNetwork

if TYPE_CHECKING:
    from rich.progress import Progress

_Arrays = dict[str, NDArray[Any]]
_LONGEST_STEM = 40
_MOST_HEADS = 11
"""Heads of a layer that are drawn beside its mean; the arrays hold all."""


@dataclass(frozen=True)
class Explained:
    """What `explain_files` did."""

    count: int
    """Images that were explained."""
    errors: tuple[ImageError, ...]
    """Images that could not be read."""
    notes: tuple[str, ...]
    """What this network has no pictures of."""


@dataclass(frozen=True)
class Explanation:
    """What was found out about a batch of B images, on the CPU; maps are on grids of their own."""

    probabilities: Tensor | None
    """`(B, K)`, calibrated; None where the network knows no classes."""
    targets: Tensor | None
    """The class whose gradient was taken, int64 `(B,)`."""
    maps: dict[str, Tensor]
    """`gradient`, `rollout`, `surprisal`, as far as the network has them: `(B, h, w)`."""
    layers: dict[str, Tensor]
    """Of each chosen layer the maps of its heads or groups, `(B, heads, h, w)`."""
    others: dict[str, Tensor]
    """Further arrays, image by image."""


def explain_batch(
    model: ModelFile, images: Tensor, *, target: int | None = None, layers: Sequence[AttentionLayer] = ()
) -> Explanation:
    """Explain preprocessed images.

    Args:
        model: its network in evaluation mode.
        images: uint8 `(B, C, H, W)`, B of 1 or more.
        target: the class whose gradient is taken; None takes each image's likeliest.
        layers: whose attention is wanted, from `attention_layers`.
    """
    network = model.network
    inputs = model.preprocess.normalize(images.to(device_of(network)))
    probabilities = targets = None
    maps: dict[str, Tensor] = {}
    if model.classifies:
        wanted = None if target is None else torch.full((len(images),), target)
        logits, maps["gradient"] = gradient_map(network, inputs, wanted)
        probabilities = (logits / model.temperature).softmax(dim=1)
        targets = logits.argmax(dim=1) if wanted is None else wanted
    if (pixels := _pixel_network(model)) is not None:
        maps["surprisal"] = surprisal(pixels, inputs)
    attention = attention_maps(network, inputs, layers)
    others = {f"{name}_weights": weights for name, weights in attention.channels.items()}
    if attention.rollout is not None and attention.rollout_map is not None:
        maps["rollout"], others["rollout_matrix"] = attention.rollout_map, attention.rollout
    return Explanation(
        None if probabilities is None else probabilities.cpu(),
        None if targets is None else targets.cpu(),
        _to_cpu(maps),
        _to_cpu(attention.heads),
        _to_cpu(others),
    )


def _to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.float().cpu() for name, tensor in tensors.items()}


def _pixel_network(model: ModelFile) -> ImageGPT | None:
    """Give the network where it was trained to say each pixel from those before it."""
    network = model.network
    trained = model.objective.get("name") in ("next_pixel", "joint")
    return network if trained and isinstance(network, ImageGPT) and network.causal else None


def explain_files(
    model: ModelFile,
    paths: Sequence[str | os.PathLike[str]],
    out: Path,
    *,
    target: str | None = None,
    layer_numbers: Sequence[int] | None = None,
    batch_size: int = 8,
    workers: int | None = 0,
    progress: "Progress | None" = None,
) -> Explained:
    """Explain image files and the images in folders, in a folder of pictures and arrays.

    Args:
        model: its network in evaluation mode.
        paths: files, and folders that are searched to any depth.
        out: the folder, empty or not there yet.
        target: the class that maps are of; None takes each image's likeliest.
        layer_numbers: blocks whose attention is wanted, the first is 1; none for all; None takes the last of each kind
            and size of grid.
        batch_size: images at a time.
        workers: loader processes; None leaves the number to the loader.
        progress: a bar to add a task to.

    Raises:
        InputError: no image can be read, `out` holds files, a class or layer is unknown, or the network has nothing to
            show.
    """
    images, _ = list_images(paths)
    class_index = _class_index(model, target)
    layers, notes = _chosen_layers(model, layer_numbers)
    _make_folder(out)
    split = files_split(images)
    loader = Loader(split, EvalTransform(model.preprocess), batch_size=batch_size, workers=workers, on_error="skip")
    task = None if progress is None else progress.add_task("explaining", total=len(split))
    count, errors = 0, list[ImageError]()
    with closing(loader):
        for batch in loader.epoch(0):
            errors += batch.errors
            if len(batch.images):
                explanation = explain_batch(model, batch.images, target=class_index, layers=layers)
                _write_batch(model, batch, explanation, split.paths, out)
                count += len(batch.images)
            if progress is not None and task is not None:
                progress.advance(task, len(batch.images) + len(batch.errors))
    if not count:
        raise InputError(f"{errors[0]}: give an image that can be read")
    _write_network(model, out)
    return Explained(count, tuple(errors), notes)


def _class_index(model: ModelFile, target: str | None) -> int | None:
    require(
        model.classifies or _pixel_network(model) is not None,
        "this network was trained on masked pixels: it has neither classes nor a surprisal to explain; give one that "
        "objective.name classification, joint or next_pixel trained",
    )
    if target is None:
        return None
    require(model.classifies, f"--class is {target}, and this network knows no classes: leave it out")
    if target not in model.classes:
        raise unknown_name("class", target, model.classes)
    return model.classes.index(target)


def _chosen_layers(model: ModelFile, numbers: Sequence[int] | None) -> tuple[list[AttentionLayer], tuple[str, ...]]:
    """Give the layers to show, and a line where the network has none."""
    network = model.network
    if isinstance(network, TimmNetwork | ImageGPT):
        what = "every pixel has one of its own" if isinstance(network, ImageGPT) else "timm does not show it"
        line = f"no maps of {network.name}'s attention ({what})"
        require(numbers is None, f"--layers: {line}: leave it out")
        return [], (line,)
    layers = attention_layers(network)
    if numbers is None:
        return last_of_each(layers), ()
    for number in numbers:
        require(
            number <= len(layers),
            f"--layers holds {number}, and {network.name} has {len(layers)} blocks: give numbers up to that",
        )
    return [layer for layer in layers if not numbers or layer.number in numbers], ()


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out} cannot be made ({error.strerror}): give another folder") from None
    require(os.access(out, os.R_OK | os.W_OK | os.X_OK), f"--out {out} cannot be written in: give another folder")
    holds_files = any(not name.startswith(".") for name in os.listdir(out))
    require(
        not holds_files, f"--out {out} holds files, which would lie among the new ones: give a new or an empty folder"
    )


def safe_name(index: int, total: int, path: str) -> str:
    """Make a file's name out of an image's, without a suffix; the number keeps equal names apart.

    Args:
        index: of the image, from 0 on.
        total: images in all.
        path: the image's.
    """
    stem = "".join(char if char.isalnum() or char in "-_" else "_" for char in Path(path).stem)
    return f"{index + 1:0{len(str(total))}d}-{stem[:_LONGEST_STEM]}"


def _write_batch(model: ModelFile, batch: Batch, explanation: Explanation, paths: Sequence[str], out: Path) -> None:
    """Write the files of each image."""
    pictures = rearrange(batch.images, "b c h w -> b h w c").contiguous().numpy()
    for row, (index, image) in enumerate(zip(batch.indices.tolist(), pictures, strict=True)):
        name = safe_name(index, len(paths), paths[index])
        save_image(out / f"{name}.png", _main_picture(model, explanation, row, image, Path(paths[index]).name))
        if explanation.layers:
            save_image(out / f"{name}-attention.png", _attention_picture(model, explanation, row, image))
        _write_arrays(out / f"{name}.npz", _arrays(explanation, row, image))


def _main_picture(model: ModelFile, explanation: Explanation, row: int, image: Picture, name: str) -> Picture:
    """Lay out the image with its class, and the main maps over it."""
    maps = {key: _on_pixels(model, tensor[row]) for key, tensor in explanation.maps.items()}
    captions = [name, *(_caption(model, explanation, row, key) for key in maps)]
    if explanation.probabilities is not None:
        best = int(explanation.probabilities[row].argmax())
        captions[0] = f"{model.classes[best]} {explanation.probabilities[row, best]:.1%}"
    return image_grid(tiles(image, list(maps.values())), captions, columns=len(captions))


def _caption(model: ModelFile, explanation: Explanation, row: int, key: str) -> str:
    if key == "gradient" and explanation.targets is not None:
        return f"speaks for {model.classes[int(explanation.targets[row])]}"
    if key == "surprisal":
        return f"surprisal: {explanation.maps[key][row].sum():.0f} nats in all"
    return "attention rollout"


def _attention_picture(model: ModelFile, explanation: Explanation, row: int, image: Picture) -> Picture:
    """Lay out a row for each layer: the mean, then as many heads as a row holds; captions give what is brightest."""
    width = 1 + min(_MOST_HEADS, max(heads.shape[1] for heads in explanation.layers.values()))
    rows, captions = [], list[str]()
    for name, heads in explanation.layers.items():
        word = "group" if "channel" in name else "head"
        shown = [heads[row].mean(dim=0), *heads[row][: width - 1]]
        drawn = tiles(image, [_on_pixels(model, values) for values in shown])[1:]
        blank = np.full((width - len(drawn), *drawn.shape[1:]), 255, np.uint8)
        rows.append(np.concatenate([drawn, blank]))
        texts = [f"{name.replace('_', ' ')}, mean", *(f"{word} {number}" for number in range(1, len(shown)))]
        captions += [f"{text}: max {values.max():.2g}" for text, values in zip(texts, shown, strict=True)]
        captions += [""] * len(blank)
    return image_grid(np.concatenate(rows), captions, columns=width)


def _on_pixels(model: ModelFile, values: Tensor) -> NDArray[np.float32]:
    stretched: NDArray[np.float32] = to_pixels(model.network, values).numpy()
    return stretched


def _arrays(explanation: Explanation, row: int, image: Picture) -> _Arrays:
    """Give all that is known of one image by name."""
    tensors = {**explanation.maps, **explanation.layers, **explanation.others}
    arrays: _Arrays = {"image": image, **{name: tensor[row].numpy() for name, tensor in tensors.items()}}
    if explanation.probabilities is not None and explanation.targets is not None:
        arrays["probabilities"] = explanation.probabilities[row].numpy()
        arrays["target"] = explanation.targets[row].numpy()
    return arrays


def _write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    with replacing(path) as aside, aside.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def _write_network(model: ModelFile, out: Path) -> None:
    """Write what is the same for all images: who can reach whom, and how alike the positions are."""
    layers = attention_layers(model.network)
    arrays: _Arrays = {f"reach_{name}": matrix.numpy() for name, matrix in kinds_of_reach(layers).items()}
    if arrays:
        save_image(out / "reach.png", reach_picture({name.removeprefix("reach_"): arrays[name] for name in arrays}))
    similarity = position_similarity(model.network)
    if similarity is not None:
        arrays["position_similarity"] = similarity.numpy()
        save_image(out / "positions.png", positions_picture(arrays["position_similarity"], layers[0].grid))
    if arrays:
        _write_arrays(out / "network.npz", arrays)
