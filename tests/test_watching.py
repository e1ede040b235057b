"""What TensorBoard shows besides curves: the right values, and after a stop the same to the last bit."""

import io
import signal

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from PIL import Image
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

from vitlab.data.datasets import load_split
from vitlab.data.preprocess import EvalTransform
from vitlab.engine import trainer
from vitlab.engine.tensorboard import EVENTS_NAME, read_events
from vitlab.errors import Interrupted
from vitlab.inference.scoring import read_split, score
from vitlab.models.files import load_model
from vitlab.runs import watching
from vitlab.runs.training import run_training

WATCHED = {
    "monitor__histograms": True,
    "monitor__embeddings": True,
    "train__epochs": 3,
    "train__ema_decay": 0.9,
}


@pytest.fixture(scope="module")
def watched(color_config, noise_folder, tmp_path_factory):
    """The folder of a run that shows all there is; tests must not change it."""
    return run_training(
        color_config(tmp_path_factory.mktemp("watched") / "run", data__root=str(noise_folder), **WATCHED)
    )


def values(run):
    """Give (step, tag, value) of all that TensorBoard shows, but the speeds and the configuration."""
    return [
        (event.step, value.tag, value.SerializeToString(deterministic=True))
        for event, _ in read_events(run / "tensorboard" / EVENTS_NAME)
        for value in event.summary.value
        if not value.tag.endswith(("images_per_s", "data_wait")) and not value.tag.startswith(("_hparams_", "config"))
    ]


def shown(run, tag):
    """Give step and value of a tag."""
    events = read_events(run / "tensorboard" / EVENTS_NAME)
    return [(event.step, value) for event, _ in events for value in event.summary.value if value.tag == tag]


def picture(value):
    return np.asarray(Image.open(io.BytesIO(value.image.encoded_image_string)).convert("RGB"))


def files(run):
    return {path.name: path.read_bytes() for path in (run / "tensorboard").iterdir() if path.name != EVENTS_NAME}


@pytest.mark.parametrize("at", [4, 5, 12])
def test_run_stopped_at_any_place_shows_what_an_unbroken_one_does(
    watched, noise_folder, tiny_run, tmp_path, monkeypatch, at
):
    broken = tiny_run(
        **WATCHED,
        data__root=str(noise_folder),
        train__run_dir=str(tmp_path / "broken"),
        train__checkpoint_every_steps=2,
    )
    make_step = trainer.Trainer.train_step

    def step(self, micro_batches):
        report = make_step(self, micro_batches)
        if self.progress.step == at:
            signal.raise_signal(signal.SIGTERM)
        return report

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "train_step", step)
        with pytest.raises(Interrupted):
            run_training(broken)
    run_training(broken)
    assert values(tmp_path / "broken") == values(watched)
    assert files(tmp_path / "broken") == files(watched)


def test_pictures_come_with_every_evaluation_or_every_best_one(watched):
    best = sorted({step for step, _ in shown(watched, "val/confusion")})
    assert best[0] == 5
    assert [step for step, _ in shown(watched, "val/attention")] == [5, 10, 15]
    assert {step for step, _ in shown(watched, "val/mistakes")} <= set(best)
    for name in ("val/pr", "val/pr/blue", "val/pr/green", "val/pr/red"):
        assert [step for step, _ in shown(watched, name)] == best


def test_mistakes_are_those_of_the_best_weights_worst_first(watched, noise_folder):
    model = load_model(watched)
    split = read_split(model, str(noise_folder), "val").split
    images = score(model, split, batch_size=8, workers=0, on_error="stop").images
    rows = images.worst_mistakes(16)
    assert len(rows), "the run is too good to test with"
    mistakes = [value for step, value in shown(watched, "val/mistakes") if step == model.metrics["step"]]
    grid = picture(mistakes[0])
    first = EvalTransform(model.preprocess)(split.read(int(images.index[rows[0]])), 0)
    zoom = 8  # 8 x 12 pixels, enlarged to 96 wide, 6 from the edge
    shown_pixels = grid[10 : 6 + 8 * zoom : zoom, 10 : 6 + 12 * zoom : zoom].astype(int)
    assert np.abs(shown_pixels - first).mean() < 8  # JPEG, and colours of half the width
    other = EvalTransform(model.preprocess)(split.read(int(images.index[images.correct][0])), 0)
    assert np.abs(shown_pixels - other).mean() > 20


def test_precision_and_recall_equal_counts_by_hand(watched, noise_folder):
    model = load_model(watched)
    split = read_split(model, str(noise_folder), "val").split
    logits, labels = score(model, split, batch_size=8, workers=0, on_error="stop").logits.tensors()
    shares = logits.double().softmax(dim=1)[:, 1].numpy()
    truth = labels.numpy() == 1
    curve = np.array([value for step, value in shown(watched, "val/pr/green")][-1].tensor.float_val).reshape(6, 127)
    for place in (0, 30, 63, 100):
        taken = np.floor(shares * 126) >= place
        expected = [(taken & truth).sum(), (taken & ~truth).sum(), (~taken & ~truth).sum(), (~taken & truth).sum()]
        assert curve[:4, place].tolist() == expected


def test_histograms_hold_the_weights_and_the_gradients_of_the_last_step(watched):
    model = load_model(watched / "last.safetensors")
    name = "blocks.1.attn.qkv.weight"
    steps, shown_weights = zip(*shown(watched, f"weights/{name}"), strict=True)
    assert steps == (5, 10, 15)
    weights = dict(model.network.named_parameters())[name].detach().double()
    histogram = shown_weights[-1].histo
    if model.weights == "raw":
        assert histogram.num == weights.numel()
        assert histogram.sum == pytest.approx(weights.sum().item(), rel=1e-6)
        assert (histogram.min, histogram.max) == (weights.min().item(), weights.max().item())
    assert sum(histogram.bucket) == weights.numel()
    assert tuple(step for step, _ in shown(watched, f"gradients/{name}")) == steps
    norms = {step: value.simple_value for step, value in shown(watched, "train/grad_norm")}
    tags = {v.tag for e, _ in read_events(watched / "tensorboard" / EVENTS_NAME) for v in e.summary.value}
    for place, step in enumerate(steps):  # the squares of all gradients add up to the logged norm
        total = sum(shown(watched, tag)[place][1].histo.sum_squares for tag in tags if tag.startswith("gradients/"))
        assert total**0.5 == pytest.approx(norms[step], rel=1e-5)


def test_embeddings_are_the_features_of_the_best_weights(watched, noise_folder):
    folder = watched / "tensorboard"
    config = text_format.Parse((folder / "projector_config.pbtxt").read_text(), ProjectorConfig()).embeddings[0]
    vectors = np.loadtxt(folder / config.tensor_path)
    split, _ = load_split(str(noise_folder), "val", classes=("blue", "green", "red"), val_fraction=0.1, seed=0)
    head, *names = (folder / config.metadata_path).read_text().splitlines()
    assert head == "class\timage"
    assert names == [
        f"{('blue', 'green', 'red')[label]}\t{path}" for label, path in zip(split.labels, split.paths, strict=True)
    ]
    model = load_model(watched)
    transform = EvalTransform(model.preprocess)
    images = torch.from_numpy(np.stack([transform(split.read(row), 0) for row in range(len(split))])).permute(
        0, 3, 1, 2
    )
    with torch.inference_mode():
        features = model.network.forward_features(model.preprocess.normalize(images))
        expected = model.network.forward_head(features, pre_logits=True)
    np.testing.assert_allclose(vectors, expected, rtol=1e-3, atol=1e-4)
    with Image.open(folder / config.sprite.image_path) as sprite:
        assert sprite.size == (4 * 48, 4 * 32)
    assert list(config.sprite.single_image_dim) == [48, 32]  # width and height of 8 x 12 pixels, enlarged


def test_layout_groups_curves_that_the_run_has(watched):
    ((_, value),) = shown(watched, "custom_scalars__config__")
    layout = Layout.FromString(value.tensor.string_val[0])
    assert [group.title for group in layout.category] == ["scores", "optimization", "speed"]
    tags = {v.tag for e, _ in read_events(watched / "tensorboard" / EVENTS_NAME) for v in e.summary.value}
    for group in layout.category:
        for chart in group.chart:
            assert {tag.strip("^$") for tag in chart.multiline.tag} <= tags, chart.title


def test_nothing_is_spread_or_embedded_unless_asked_for(finished_run):
    tags = {v.tag for e, _ in read_events(finished_run / "tensorboard" / EVENTS_NAME) for v in e.summary.value}
    assert not [tag for tag in tags if tag.startswith(("weights/", "gradients/"))]
    assert "val/attention" in tags
    assert [path.name for path in (finished_run / "tensorboard").iterdir()] == [EVENTS_NAME]


def test_map_that_does_not_fit_into_memory_is_left_out_and_the_run_goes_on(tiny_run, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(watching, "explain_map", full)
    run = run_training(tiny_run(train__epochs=1))
    assert shown(run, "val/attention") == []
    assert shown(run, "val/confusion")
