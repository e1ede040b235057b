"""Two runs on the same images: who was right, on what, and which comparisons are refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from vitlab.__main__ import main
from vitlab.config import DataConfig, OptimConfig, RunConfig
from vitlab.data.datasets import fingerprint, load_dataset, load_split
from vitlab.data.preprocess import Preprocess
from vitlab.engine.statistics import mean_difference_interval, paired_difference_interval, wilson_interval
from vitlab.errors import InputError
from vitlab.inference.compare import compare_runs, points
from vitlab.inference.predictor import Predictor
from vitlab.models.catalog import create_model
from vitlab.models.files import save_model
from vitlab.options import CompareOptions

PREPROCESS = Preprocess(image_size=(8, 12), resize_mode="squash")


@pytest.fixture
def make_run(tmp_path, color_folder):
    """A function that writes the folder of a run whose network has random weights."""

    def make(name, *, seed=0, data=color_folder, val_seed=0, lr=1e-3, classes=None, folder_is_whole=True):
        dataset = load_dataset(data, val_fraction=0.2, seed=val_seed)
        classes = classes or dataset.classes
        torch.manual_seed(seed)
        sizes = {"patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 2}
        network = create_model("vit_tiny", num_classes=len(classes), image_size=(8, 12), **sizes)
        order = [dataset.classes.index(one) if one in dataset.classes else 0 for one in classes]
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(std=0.5)
            for parameter in network.get_classifier().parameters():  # the same network in any order of the classes
                parameter.copy_(parameter[order])
        origin = {"val_fraction": 0.2, "seed": val_seed, "fingerprint": fingerprint(dataset)}
        folder = tmp_path / name
        folder.mkdir(parents=True)
        save_model(
            folder / "best.safetensors", network, classes=classes, preprocess=PREPROCESS, metrics={}, data=origin
        )
        if folder_is_whole:
            config = RunConfig(
                data=DataConfig(root=str(data), val_fraction=0.2, val_seed=val_seed), optim=OptimConfig(lr=lr)
            )
            (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        return folder

    return make


@pytest.fixture
def flat_folder(tmp_path, color_folder):
    """Class folders without splits."""
    shutil.copytree(color_folder / "train", tmp_path / "flat")
    return tmp_path / "flat"


@pytest.fixture
def mixed_folder(tmp_path, color_folder):
    """A test split in which half of the images lie in another colour's folder, so that nobody gets a class whole."""
    names = sorted(path.name for path in (color_folder / "test").iterdir())
    for number, path in enumerate(sorted((color_folder / "test").rglob("*.png"))):
        name = names[(names.index(path.parent.name) + number % 2) % 3]
        (tmp_path / "mixed" / "test" / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / "mixed" / "test" / name / f"{path.parent.name}{path.name}")
    return tmp_path / "mixed"


def compare(a, b, **options):
    """Compare two runs in this process; give the result and what was said."""
    said = []
    chosen = CompareOptions(run_a=str(a), run_b=str(b), **({"workers": 0, "device": "cpu"} | options))
    return compare_runs(chosen, say=said.append), said


def right(run, data, split):
    """Predict each image of a split file by file: whether it is right (N,)."""
    predictor = Predictor(run, device="cpu")
    found, _ = load_split(data, split, classes=predictor.classes, val_fraction=0.2, seed=0)
    return predictor.predict(found.paths).argmax(axis=1) == found.labels


def test_compare_counts_who_was_right_where_the_other_was_not(make_run, mixed_folder):
    a, b = make_run("a", seed=7), make_run("b", seed=5, classes=("red", "blue", "green"))
    result = compare(a, b, data=str(mixed_folder))[0].to_dict()
    of_a, of_b = right(a, mixed_folder, "test"), right(b, mixed_folder, "test")
    only_a, only_b = int((of_a & ~of_b).sum()), int((of_b & ~of_a).sum())
    both, neither = int((of_a & of_b).sum()), int((~of_a & ~of_b).sum())
    assert only_a != only_b
    assert min(only_a, only_b, both, neither) > 0
    (pair,) = result["pairs"]
    assert (pair["only_a_right"], pair["only_b_right"]) == (only_a, only_b)
    assert (pair["both_right"], pair["neither_right"]) == (both, neither)
    assert pair["mcnemar_p"] == binomtest(only_a, only_a + only_b).pvalue
    assert pair["difference"] == result["difference"] == pytest.approx((only_a - only_b) / 12)
    assert pair["interval"] == result["interval"] == [*paired_difference_interval(both, only_a, only_b, neither)]
    assert pair["a"]["top1"] == of_a.mean()
    assert pair["b"]["intervals"]["top1"] == [*wilson_interval(int(of_b.sum()), 12)]
    assert (result["split"], result["count"], result["data"]) == ("test", 12, str(mixed_folder))


def test_compare_matches_classes_by_name(make_run):
    one, other = make_run("one"), make_run("other", classes=("red", "blue", "green"))
    (pair,) = compare(one, other)[0].to_dict()["pairs"]
    assert (pair["only_a_right"], pair["only_b_right"], pair["mcnemar_p"]) == (0, 0, 1.0)
    assert pair["a"]["loss"] == pytest.approx(pair["b"]["loss"], abs=1e-6)


def test_compare_refuses_other_classes(make_run):
    one, other = make_run("one"), make_run("other", classes=("blue", "green", "crimson"))
    with pytest.raises(
        InputError, match=r"classes differ \(3 and 3\): only .*one knows red; only .*other knows crimson"
    ):
        compare(one, other)


def test_compare_names_the_fields_that_differ(make_run):
    a, b = make_run("a", lr=1e-3), make_run("b", lr=2e-3)
    assert compare(a, b)[0].to_dict()["config"] == {"optim.lr": [1e-3, 2e-3]}
    assert compare(a, a)[0].to_dict()["config"] == {}
    with (b / "config.yaml").open("a") as file:
        file.write("future: {field: 3}\n")
    assert compare(a, b)[0].config == {"optim.lr": (1e-3, 2e-3), "future.field": (None, 3)}


def test_compare_of_a_bare_model_file_needs_data_and_leaves_the_configuration_out(make_run, color_folder):
    a, bare = make_run("a"), make_run("b", seed=1, folder_is_whole=False)
    for other in (bare, bare / "best.safetensors"):
        with pytest.raises(InputError, match=r"has no config\.yaml that names its data: give the images with --data"):
            compare(a, other)
        result = compare(a, other, data=str(color_folder))[0].to_dict()
        assert result["config"] is None
        assert result["count"] == 12


def test_compare_asks_which_data_where_the_runs_differ(make_run, flat_folder):
    with pytest.raises(InputError, match=r"was trained on .*colors.*, .*b on .*flat: say which with --data"):
        compare(make_run("a"), make_run("b", data=flat_folder))


def test_compare_takes_validation_where_there_is_no_test_split(make_run, flat_folder):
    comparison, said = compare(make_run("a", data=flat_folder, seed=1), make_run("b", data=flat_folder, seed=2))
    result = comparison.to_dict()
    assert (result["split"], result["count"]) == ("val", 9)
    assert any("has no test split" in line and "comparing on val" in line for line in said)
    assert not any("note:" in line for line in said)


def test_compare_refuses_validation_images_that_the_other_may_have_trained_on(make_run, flat_folder):
    a, b = make_run("a", data=flat_folder), make_run("b", data=flat_folder, val_seed=1)
    with pytest.raises(
        InputError, match=r"another cut for A \(9 images\) than for B .*trained on the other's: .*--split"
    ):
        compare(a, b)
    assert compare(a, b, split="all")[0].to_dict()["count"] == 39


def test_compare_takes_all_of_a_folder_that_neither_knows_and_that_is_not_divided(make_run, flat_folder, capsys):
    lines = []
    result = compare_runs(
        CompareOptions(run_a=str(make_run("a")), run_b=str(make_run("b", seed=1)), data=str(flat_folder), workers=0),
        say=lines.append,
    ).to_dict()
    assert result["split"] == "all"
    assert result["pairs"][0]["a"]["count"] == 39
    assert any("comparing on all images" in line for line in lines)


def test_compare_refuses_a_cut_that_is_no_longer_the_runs_own(make_run, flat_folder):
    a, b = make_run("a", data=flat_folder), make_run("b", data=flat_folder, seed=1)
    compare(a, b, split="val")
    shutil.copy(flat_folder / "red" / "000.png", flat_folder / "red" / "new.png")
    with pytest.raises(
        InputError, match=r"^A and B did not validate on this cut of .*flat and may have been trained on"
    ):
        compare(a, b, split="val")


def test_compare_takes_a_validation_folder_that_neither_knows_with_a_note(make_run, color_folder, tmp_path):
    shutil.copytree(color_folder / "test", tmp_path / "new" / "val")
    a, b = make_run("a"), make_run("b", seed=1)
    comparison, said = compare(a, b, data=str(tmp_path / "new"))
    assert comparison.to_dict()["count"] == 12
    assert [line for line in said if line.startswith("note")] == [
        f"note: {side}: these are not the val images of the model's own run, and it may have seen some" for side in "AB"
    ]


def test_compare_says_that_both_were_trained_on_the_images(make_run):
    _, said = compare(make_run("a"), make_run("b", seed=1), split="train")
    assert said == [f"note: {side}: the model was trained on these images" for side in "AB"]


def test_compare_pairs_seeds_and_gives_the_mean(make_run, color_folder, tmp_path):
    for recipe, seeds, shift in (("a", (1, 2, 10), 0), ("b", (2, 10, 3), 50)):
        for seed in seeds:
            make_run(f"{recipe}/seed-{seed}", seed=seed + shift, lr=1e-3 * (1 + bool(shift)))
    parents = [tmp_path / recipe for recipe in "ab"]
    result = compare(*parents)[0].to_dict()
    assert [pair["name"] for pair in result["pairs"]] == ["seed-2", "seed-10"]
    assert result["left_out"] == [
        f"seed-1 has a model file in {parents[0]} alone",
        f"seed-3 has a model file in {parents[1]} alone",
    ]
    assert result["config"] == {"optim.lr": [1e-3, 2e-3]}
    differences = np.array(
        [
            right(parents[0] / name, color_folder, "test").astype(float)
            - right(parents[1] / name, color_folder, "test")
            for name in ("seed-2", "seed-10")
        ]
    )
    assert result["difference"] == pytest.approx(differences.mean())
    assert result["interval"] == pytest.approx([*mean_difference_interval(differences)])
    assert result["difference"] == pytest.approx(np.mean([pair["difference"] for pair in result["pairs"]]))


def test_compare_refuses_seeds_that_validated_on_different_images(make_run, flat_folder, tmp_path):
    for recipe in "ab":
        for seed in (1, 2):
            make_run(f"{recipe}/seed-{seed}", seed=seed, data=flat_folder, val_seed=seed)
    with pytest.raises(
        InputError, match=r"^seed-2 has other val images of .*flat than seed-1: compare on --split test"
    ):
        compare(tmp_path / "a", tmp_path / "b")


def test_compare_leaves_out_what_a_run_could_not_read(make_run, color_folder, tmp_path, capsys):
    shutil.copytree(color_folder / "test", tmp_path / "data" / "test")
    broken = tmp_path / "data" / "test" / "green" / "001.png"
    broken.write_bytes(broken.read_bytes()[:100])
    a, b = make_run("a", seed=1), make_run("b", seed=2)
    with pytest.raises(InputError, match=r"001\.png"):
        compare(a, b, data=str(tmp_path / "data"))
    comparison, _ = compare(a, b, data=str(tmp_path / "data"), on_error="skip")
    result = comparison.to_dict()
    assert comparison.skipped
    assert result["count"] == 11
    kept = np.delete(np.arange(12), 5)
    expected = [right(run, color_folder, "test")[kept] for run in (a, b)]
    assert result["difference"] == pytest.approx(expected[0].mean() - expected[1].mean())
    assert main(["compare", str(a), str(b), "--data", str(tmp_path / "data"), "--on_error", "skip"]) == 3


def test_compare_is_independent_of_the_batch_size(make_run):
    a, b = make_run("a", seed=1), make_run("b", seed=2)
    whole = compare(a, b)[0]
    np.testing.assert_array_equal(compare(a, b, batch_size=5)[0].verdicts, whole.verdicts)


def test_compare_command_prints_and_writes_the_comparison(make_run, tmp_path, capsys):
    a, b, out = make_run("a", seed=1), make_run("b", seed=2, lr=2e-3), tmp_path / "new" / "c.json"
    assert main(["compare", str(a), str(b), "--json", str(out), "--workers", "0"]) == 4
    result, printed = json.loads(out.read_text()), capsys.readouterr().out
    low, high = result["interval"]
    assert low < result["difference"] < high
    assert f"top-1 of A minus B: {points(result['difference'], result['interval'])} points; " in printed
    assert f"A {a}: top-1 {result['pairs'][0]['a']['top1']:.2%} (" in printed
    assert "optim.lr" in printed
    assert "another seed may differ by more" in printed


def test_compare_command_prints_a_row_a_seed_and_their_mean(make_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    for recipe in "ab":
        for seed in (1, 2):
            make_run(f"{recipe}/seed-{seed}", seed=seed + 10 * (recipe == "b"))
    parents = [str(tmp_path / recipe) for recipe in "ab"]
    assert main(["compare", *parents, "--workers", "0"]) == 4
    printed = capsys.readouterr().out
    result = compare(*parents)[0].to_dict()
    for pair in (*result["pairs"], result):
        assert points(pair["difference"], pair["interval"]) in printed
    assert "mean of 2 seeds; the 95% interval covers the choice of images and of seeds" in printed
    assert "\nseed-2: best weights differ in " in printed
    assert main(["compare", parents[0], parents[0], "--workers", "0"]) == 0


def test_points_write_percentage_points_with_their_sign():
    assert points(0.0111, (-0.0061, 0.029)) == "+1.11 (-0.61 to +2.90)"


def test_compare_options_refuse_a_json_file_of_another_suffix(make_run, capsys):
    run = str(make_run("a"))
    assert main(["compare", run, run, "--json", "c.txt"]) == 2
    assert "--json is c.txt: give a file that ends in .json" in capsys.readouterr().err
