"""Where weights come from: our model files, other projects' files, names that timm knows. No code in them is run."""

import mmap
import pickle
import re
import socket
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from vitlab.errors import InputError, unknown_name
from vitlab.models.files import PICKLED_SUFFIXES, checkpoint_path
from vitlab.models.layouts import from_google
from vitlab.models.safetensors_file import read_safetensors
from vitlab.models.timm_network import PREFIX
from vitlab.parsing import parse_json

_SAFE_TORCH = (2, 10)
"""From here on weights-only loading has no known way around it (CVE-2025-32434, CVE-2026-24747)."""
_BESIDE_LIMIT_BYTES = 2**24
_UNPACKED_LIMIT_BYTES = 2**28
_UNPACKED_RATIO = 20
_CONNECT_TIMEOUT_S = 5.0
_TIMM_RESIZE_MODES = {"center": "crop", "squash": "squash", "border": "pad"}
_PILLOW_FILTERS = {2: "bilinear", 3: "bicubic"}


@dataclass(frozen=True)
class Source:
    """What a file holds."""

    entries: Mapping[str, Any]
    """Names to tensors, perhaps nested, perhaps with other things beside them."""
    config: Mapping[str, Any] | None = None
    """Of a model file of ours: the config of its network."""
    preprocess: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Preprocess that the source states for its weights."""


def read_source(source: str | Path) -> Source:
    """Read weights.

    Args:
        source: a model file or run folder of vitlab; another .safetensors; a .pth, .pt or .bin of torch; an .npz of
            Google's ViT or OpenAI's ImageGPT; a folder in which transformers or timm saved a model (an ImageGPT with
            the palette of its image processor); or `timm/NAME`, which is looked for where earlier downloads lie, and
            fetched only where it is not there.

    Raises:
        InputError: there is no such thing, it is damaged, or it would run code.
    """
    if str(source).startswith(PREFIX) and not Path(source).exists():
        return _named(str(source).removeprefix(PREFIX))
    path = Path(source)
    if path.is_dir() and (path / "model.safetensors").is_file() and not (path / "best.safetensors").exists():
        path = path / "model.safetensors"
    path = checkpoint_path(path)
    stated = _stated_beside(path)
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        file = read_safetensors(path)
        if file.record:
            shape = ("image_size", "channels")
            stated = {name: value for name, value in file.record["preprocess"].items() if name not in shape}
        entries = file.tensors() if file.record else _with_palette_beside(file.tensors(), path)
        return Source(entries, file.record["model"]["config"] if file.record else None, stated)
    if suffix == ".npz":
        return Source(_read_npz(path), None, {"mean": [0.5] * 3, "std": [0.5] * 3})  # Google's ViT, OpenAI's ImageGPT
    if suffix in PICKLED_SUFFIXES:
        return Source(_with_palette_beside(_read_pickled(path), path), None, stated)
    suffixes = ", ".join((*PICKLED_SUFFIXES, ".npz"))
    raise InputError(f"{path} is no weights file: give a run folder, .safetensors, {suffixes}")


def read_record(source: str | Path) -> Mapping[str, Any] | None:
    """Read the record of a model file or run folder of vitlab; None for weights from anywhere else.

    Raises:
        InputError: there is no such file, or it is damaged.
    """
    if str(source).startswith(PREFIX) and not Path(source).exists():
        return None
    path = Path(source)
    if path.is_dir() and not (path / "best.safetensors").exists():
        return None
    path = checkpoint_path(path)
    return read_safetensors(path).record if path.suffix.lower() == ".safetensors" else None


def _stated_beside(path: Path) -> dict[str, Any]:
    """Read the preprocessing that timm or transformers wrote into a file beside the weights."""
    stated: dict[str, Any] = {}
    for name, read in (("config.json", _of_timm), ("preprocessor_config.json", _of_transformers)):
        try:
            stated |= read(_read_beside(path, name))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            continue  # no such file, or one of another meaning
    return stated


def _read_beside(path: Path, name: str) -> Any:
    beside = path.parent / name
    if not beside.is_file() or beside.stat().st_size > _BESIDE_LIMIT_BYTES:  # a pipe or a device would never end
        raise ValueError(f"{beside} is no file of settings")
    return parse_json(beside.read_bytes())


def _with_palette_beside(entries: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Add the palette that transformers' image processor of an ImageGPT wrote into a file beside the weights."""
    try:
        content = _read_beside(path, "preprocessor_config.json")
        return {**entries, "palette": torch.tensor(content["clusters"], dtype=torch.float32)}
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, OverflowError):
        return entries  # no such file, or that of another network


def _of_timm(config: Mapping[str, Any]) -> dict[str, Any]:
    settings = config["pretrained_cfg"]
    return {
        "mean": list(settings["mean"]),
        "std": list(settings["std"]),
        "interpolation": "bilinear" if settings["interpolation"] == "bilinear" else "bicubic",
        "crop_fraction": float(settings.get("crop_pct") or 0.875),
        "resize_mode": _TIMM_RESIZE_MODES[settings.get("crop_mode") or "center"],
    }


def _of_transformers(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        # The processor of ImageGPT, which has clusters, maps to [-1, 1] and did not always say so.
        "mean": [0.5] * 3 if "clusters" in config else list(config["image_mean"]),
        "std": [0.5] * 3 if "clusters" in config else list(config["image_std"]),
        "interpolation": _PILLOW_FILTERS[config["resample"]],
        "resize_mode": "squash",  # its processor resizes to height and width and crops nothing
    }


def _named(name: str) -> Source:
    """Find weights that timm knows by name."""
    import huggingface_hub
    import timm

    if not timm.is_model(name):
        raise unknown_name("timm network", name, timm.list_models())
    try:
        settings = timm.get_pretrained_cfg(name)
    except RuntimeError:  # an architecture that it knows, with a tag that it does not
        raise unknown_name("timm weights", name, timm.list_pretrained(f"{name.split('.')[0]}*")) from None
    repository = settings.hf_hub_id if settings else None
    if not repository:
        raise InputError(f"timm has no pretrained weights of {name}: give a file, or a name with another tag")
    path = huggingface_hub.try_to_load_from_cache(repository, "model.safetensors")
    if not isinstance(path, str):
        path = _fetch(name, repository)
    return Source(read_safetensors(Path(path)).tensors(), None, _of_timm({"pretrained_cfg": settings.to_dict()}))


def _fetch(name: str, repository: str) -> str:
    """Download weights that the user asked for by name; say within seconds where there is no network."""
    import huggingface_hub

    address = urlsplit(huggingface_hub.constants.ENDPOINT)
    where = f"the weights {PREFIX}{name} are not on this machine"
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise InputError(
            f"{where} and cannot be fetched ({error.strerror or error}): give a file, or fetch them where a network is"
        ) from None
    try:
        path: str = huggingface_hub.hf_hub_download(repository, "model.safetensors")
    except Exception as error:  # each fault of the way has its own class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{where} and cannot be fetched ({reason}): give the file") from error
    return path


def _read_npz(path: Path) -> Mapping[str, Any]:
    """Open Google's or OpenAI's arrays; pickled objects in them are refused."""
    try:
        # numpy leaves a file that it opened itself open where it is no archive.
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked > max(_UNPACKED_LIMIT_BYTES, _UNPACKED_RATIO * path.stat().st_size):
                raise ValueError(f"it would unpack into {unpacked:,} bytes")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                return from_google({name: torch.from_numpy(arrays[name]) for name in arrays.files})
    except Exception as error:  # damaged archives make zipfile, zlib and numpy raise nearly anything
        raise InputError(f"{path} is damaged, or no .npz of plain arrays ({error}): take another copy") from error


def _read_pickled(path: Path) -> Mapping[str, Any]:
    """Open a file of torch.save without running any code that it carries."""
    version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if version < _SAFE_TORCH:
        raise InputError(f"{path} was not opened: torch {torch.__version__} can be tricked; install 2.10 or newer")
    try:
        _refuse_inflating(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of odd pickle protocols: the error below says it better
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it wants to run {wanted[1]}" if wanted else "it is damaged, or holds more than tensors"
        raise InputError(
            f"{path} was not opened: {what}; where you trust it, save its plain state dict again, best as .safetensors"
        ) from error
    except Exception as error:  # damaged pickles make torch raise nearly anything
        raise InputError(f"{path} is damaged, or not a file of torch.save: take another copy") from error
    if not isinstance(content, Mapping):
        raise InputError(f"{path} holds a {type(content).__name__}: give a file with a state dict of named tensors")
    return content


def _refuse_inflating(path: Path) -> None:
    """Raise where a file of torch.save would take more memory than it has bytes.

    torch packs nothing, so packed or overlapping entries are no file of its own; and weights-only loading still makes
    a bytearray of any length that a file asks for.

    Raises:
        ValueError: it would.
    """
    with path.open("rb") as file:
        if zipfile.is_zipfile(file):
            entries = zipfile.ZipFile(file).infolist()
            packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
            if packed or sum(entry.file_size for entry in entries) > path.stat().st_size:
                raise ValueError("it is packed, as torch.save packs nothing")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(b"\nbytearray\n") >= 0:
                raise ValueError("it holds a bytearray, which no weights are")
