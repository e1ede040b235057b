"""What is known of the named networks: published errors, published weights, parameters and multiply-adds."""

from dataclasses import dataclass
from typing import Any

import torch

from vitlab.models.catalog import create_model, list_models
from vitlab.models.costs import count_macs, count_parameters


@dataclass(frozen=True, kw_only=True)
class Published:
    """What others have reported of a network; None where nothing is published."""

    error: float | None = None
    """Share of the validation images of ImageNet-1k whose first guess is wrong, in percent."""
    source: str | None = None
    """Who reports it, and what the network had seen beside ImageNet-1k."""
    weights: str | None = None
    """Weights of this very shape, as `model.weights` takes them; those of the error unless the source denies it."""
    nats_per_pixel: float | None = None
    """Loss of a pixel's colour on test images of ImageNet-1k at 32 x 32, as the authors of ImageGPT state it."""


_DEIT = "facebookresearch/deit"
_SWIN = "microsoft/Swin-Transformer"
_DAVIT = "dingmyu/davit"

PUBLISHED = {
    "vit_tiny": Published(error=27.8, source=_DEIT, weights="timm/deit_tiny_patch16_224.fb_in1k"),
    "vit_small": Published(error=20.1, source=_DEIT, weights="timm/deit_small_patch16_224.fb_in1k"),
    "vit_base": Published(error=18.2, source=_DEIT, weights="timm/deit_base_patch16_224.fb_in1k"),
    "vit_large": Published(
        error=14.1,
        source="AugReg by timm's results; ImageNet-21k first",
        weights="timm/vit_large_patch16_224.augreg_in21k_ft_in1k",
    ),
    "vit_huge": Published(
        error=11.45,
        source="arXiv:2010.11929; 303M images first, not these weights",
        weights="timm/vit_huge_patch14_224.orig_in21k",
    ),
    "swin_tiny": Published(error=18.8, source=_SWIN, weights="timm/swin_tiny_patch4_window7_224.ms_in1k"),
    "swin_small": Published(error=16.8, source=_SWIN, weights="timm/swin_small_patch4_window7_224.ms_in1k"),
    "swin_base": Published(error=16.5, source=_SWIN, weights="timm/swin_base_patch4_window7_224.ms_in1k"),
    "swin_large": Published(
        error=13.7,
        source=f"{_SWIN}; ImageNet-22k first",
        weights="timm/swin_large_patch4_window7_224.ms_in22k_ft_in1k",
    ),
    "davit_tiny": Published(error=17.2, source=_DAVIT, weights="timm/davit_tiny.msft_in1k"),
    "davit_small": Published(error=15.8, source=_DAVIT, weights="timm/davit_small.msft_in1k"),
    "davit_base": Published(error=15.4, source=_DAVIT, weights="timm/davit_base.msft_in1k"),
    "davit_large": Published(),
    "davit_huge": Published(),
    "davit_giant": Published(error=9.6, source="arXiv:2204.03645; 1.5G image-text pairs first"),
    "imagegpt_small": Published(nats_per_pixel=2.0895),
    "imagegpt_medium": Published(nats_per_pixel=2.0614),
    "imagegpt_large": Published(
        error=27.4,
        source="Generative Pretraining from Pixels; fine-tuned at 48x48",
        nats_per_pixel=2.0466,
    ),
    "imagegpt_xlarge": Published(),
}


def describe_models() -> list[dict[str, Any]]:
    """Give a row for each named network, at its native size and 1000 classes, as plain JSON values.

    Nothing is fetched, and no network gets any data.

    Returns:
        Rows of `name`, `parameters`, `macs` (multiply-adds of one image), `image_size` ([height, width] in pixels),
        `top1_error` (a fraction), `source`, `weights` and `nats_per_pixel` as in `Published`.
    """
    rows = []
    for name in list_models():
        with torch.device("meta"):
            network = create_model(name)
        known = PUBLISHED[name]
        rows.append(
            {
                "name": name,
                "parameters": count_parameters(network),
                "macs": count_macs(network),
                "image_size": list(network.image_size),
                "top1_error": None if known.error is None else round(known.error / 100, 6),
                "source": known.source,
                "weights": known.weights,
                "nats_per_pixel": known.nats_per_pixel,
            }
        )
    return rows
