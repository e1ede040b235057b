"""The data check: each detector on a folder that has the one fault, and leaks planted among photographs."""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from vitlab.__main__ import main
from vitlab.data.splits import FileSplit
from vitlab.errors import InputError
from vitlab.inference.check import check_data


def picture(seed, size=(60, 44)):
    """Give a picture of blobs and fine texture, (width, height)."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize(
        size, Image.Resampling.BICUBIC
    )
    fine = Image.fromarray(generator.integers(0, 256, (size[1] // 3, size[0] // 3, 3), dtype=np.uint8)).resize(size)
    return Image.blend(coarse, fine, 0.3)


@pytest.fixture
def clean(tmp_path):
    """Two classes of twelve pictures in train and two in val, none like another."""
    root = tmp_path / "data"
    for part, (split, count) in enumerate((("train", 12), ("val", 2))):
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                picture(9001000 * part + 100 * label + number).save(root / split / name / f"{number}.png")
    return root


def found(root, **options):
    """Give kind -> sets of paths below the root, or notes where a case has no picture."""
    report = check_data(root, workers=0, **options)
    names = {}
    for finding in report.findings:
        for case in finding.cases:
            paths = frozenset(picture.path.removeprefix(f"{root}/") for picture in case.pictures)
            names.setdefault(finding.kind, set()).add(paths or case.note)
    return names


def test_check_finds_nothing_in_a_clean_folder(clean):
    report = check_data(clean, workers=0)
    assert report.findings == ()
    assert report.facts["sizes, height x width"] == {"44x60": 28}
    assert report.facts["colour modes"] == {"RGB": 28}
    assert report.counts == {"train": {"cat": 12, "dog": 12}, "val": {"cat": 2, "dog": 2}}


def test_check_decodes_whole_files_and_changes_none(clean):
    whole = (clean / "train/cat/3.png").read_bytes()
    (clean / "train/cat/3.png").write_bytes(whole[: len(whole) // 2])
    (clean / "val/dog/1.png").write_bytes(b"")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in clean.rglob("*") if path.is_file()}
    assert found(clean) == {"unreadable": {frozenset({"train/cat/3.png"}), frozenset({"val/dog/1.png"})}}
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in clean.rglob("*") if path.is_file()} == before


def test_check_finds_suspicious_files(clean):
    Image.new("RGB", (60, 44), (200, 10, 30)).save(clean / "train/cat/flat.jpg")
    picture(9001, (9, 7)).save(clean / "train/cat/tiny.png")
    picture(9002, (44, 300)).save(clean / "train/dog/long.png")
    picture(9003).save(clean / "train/dog/liar.png", "JPEG")
    assert found(clean) == {
        "one_color": {frozenset({"train/cat/flat.jpg"})},
        "tiny_image": {frozenset({"train/cat/tiny.png"})},
        "extreme_aspect": {frozenset({"train/dog/long.png"})},
        "wrong_suffix": {frozenset({"train/dog/liar.png"})},
    }


def test_check_tells_leaks_conflicts_and_duplicates_apart(clean):
    shutil.copy(clean / "train/cat/0.png", clean / "val/cat/leak.png")
    shutil.copy(clean / "train/cat/1.png", clean / "train/dog/conflict.png")
    shutil.copy(clean / "train/cat/2.png", clean / "val/dog/both.png")
    shutil.copy(clean / "train/cat/3.png", clean / "train/cat/plain.png")
    Image.open(clean / "train/dog/4.png").resize((90, 66)).save(clean / "val/dog/near.jpg", quality=80)
    leak, conflict, both, plain, near = (
        frozenset(names)
        for names in (
            {"train/cat/0.png", "val/cat/leak.png"},
            {"train/cat/1.png", "train/dog/conflict.png"},
            {"train/cat/2.png", "val/dog/both.png"},
            {"train/cat/3.png", "train/cat/plain.png"},
            {"train/dog/4.png", "val/dog/near.jpg"},
        )
    )
    assert found(clean) == {
        "exact_leak": {leak, both},
        "exact_conflict": {conflict, both},
        "exact_duplicate": {plain},
        "near_leak": {near},
    }


def test_check_finds_a_mirrored_picture_of_other_colours_never(clean):
    original = Image.open(clean / "train/dog/4.png")
    ImageOps.mirror(original).save(clean / "val/dog/mirrored.jpg", quality=90)
    red, green, blue = original.split()
    Image.merge("RGB", (green, red, blue)).save(clean / "val/dog/other.png")
    assert found(clean) == {"near_leak": {frozenset({"train/dog/4.png", "val/dog/mirrored.jpg"})}}


def test_check_counts_orientations_and_modes(clean):
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(9005).save(clean / "train/cat/turned.jpg", exif=exif)
    picture(9006).convert("L").save(clean / "train/cat/grey.png")
    report = check_data(clean, workers=0)
    assert report.findings == ()
    assert report.facts["EXIF orientations"] == {"1": 29, "6": 1}
    assert report.facts["colour modes"] == {"RGB": 29, "L": 1}
    assert report.facts["sizes, height x width"] == {"44x60": 29, "60x44": 1}


def test_check_gives_the_same_with_processes(clean):
    (clean / "val/dog/1.png").write_bytes(b"no image")
    shutil.copy(clean / "train/cat/0.png", clean / "val/cat/leak.png")
    alone, together = check_data(clean, workers=0), check_data(clean, workers=2)
    assert alone.to_dict() == together.to_dict()
    assert len(alone.problems) == 2


def test_check_takes_arrays(capsys):
    report = check_data("digits", workers=0)
    assert report.facts == {"sizes, height x width": {"8x8": 1797}}
    assert {name: sum(counts.values()) for name, counts in report.counts.items()} == {"train": 1438, "test": 359}
    assert report.notes == ("1,797 images are under 32 pixels a side and compared byte by byte alone",)


def test_check_lists_splits_in_the_order_of_a_run(clean):
    shutil.copytree(clean / "val", clean / "test")
    assert list(check_data(clean, workers=0).counts) == ["train", "val", "test"]


def test_check_speaks_of_one_image_in_the_singular(clean):
    picture(9007, (18, 20)).save(clean / "train/cat/small.png")
    assert check_data(clean, workers=0).notes == ("1 image is under 32 pixels a side and compared byte by byte alone",)


def test_check_reports_a_file_that_vanishes_while_it_is_read(clean, monkeypatch):
    read = FileSplit.read

    def read_once(self, index):
        image = read(self, index)
        Path(self.paths[index]).unlink()
        return image

    monkeypatch.setattr(FileSplit, "read", read_once)
    report = check_data(clean, workers=0)
    assert len(report.find("unreadable")) == 28
    assert {case.note for case in report.find("unreadable")} == {"cannot be opened: No such file or directory"}


def test_check_prints_notes_beside_the_verdict(clean, capsys):
    picture(9007, (18, 20)).save(clean / "train/cat/small.png")
    assert main(["check", str(clean), "--workers", "0"]) == 0
    note = "note: 1 image is under 32 pixels a side and compared byte by byte alone"
    assert capsys.readouterr().out.splitlines()[-2:] == [note, f"{clean}: no problem found"]


def test_check_page_shows_small_pictures_large_and_says_what_cannot_be_shown(clean, tmp_path):
    shutil.copy(clean / "train/cat/0.png", clean / "val/cat/leak.png")
    picture(9008, (300, 200)).save(clean / "train/dog/large.png")
    shutil.copy(clean / "train/dog/large.png", clean / "val/dog/large.png")
    (clean / "val/dog/1.png").write_bytes(b"no image")
    assert main(["check", str(clean), "--workers", "0", "--report", str(tmp_path / "page")]) == 3
    page = (tmp_path / "page/index.html").read_text(encoding="utf-8")
    assert page.count(' class="enlarged">') == 2
    assert page.count("<img ") == 4
    assert page.count('<div class="missing">cannot be shown</div>') == 1
    assert 'val/<wbr>cat/<wbr>leak<span class="suffix">.png</span></span></figcaption>' in page


def test_check_command_writes_findings_and_ends_with_3(clean, tmp_path, capsys):
    line = ["check", str(clean), "--workers", "0", "--json", str(tmp_path / "found.json")]
    assert main(line) == 0
    assert json.loads((tmp_path / "found.json").read_text())["problems"] == []
    shutil.copy(clean / "train/cat/0.png", clean / "val/cat/leak.png")
    assert main([*line, "--report", str(tmp_path / "page")]) == 3
    output = capsys.readouterr().out
    assert "problem: identical files in several splits (leaks): 1\n" in output
    (problem,) = json.loads((tmp_path / "found.json").read_text())["problems"]
    assert problem["kind"] == "exact_leak"
    assert problem["cases"][0]["images"] == [
        {"path": f"{clean}/train/cat/0.png", "split": "train", "class": "cat"},
        {"path": f"{clean}/val/cat/leak.png", "split": "val", "class": "cat"},
    ]
    assert (tmp_path / "page/index.html").read_text().count("data:image/jpeg;base64,") == 2


def test_check_command_refuses_a_report_inside_the_data(clean, capsys):
    assert main(["check", str(clean), "--report", str(clean / "train" / "page")]) == 2
    assert "lies in the data set" in capsys.readouterr().err
    assert not (clean / "train" / "page").exists()


def test_check_command_writes_no_file_into_the_data(clean, capsys):
    (clean / "train/cat/notes.json").write_text("mine")
    for name in ("train/cat/notes.json", "new/found.json"):
        assert main(["check", str(clean), "--json", str(clean / name)]) == 2
        assert "lies in the data set" in capsys.readouterr().err
    assert (clean / "train/cat/notes.json").read_text() == "mine"
    assert not (clean / "new").exists()


def test_check_command_refuses_empty_paths(clean, capsys):
    assert main(["check", ""]) == 2
    assert main(["check", str(clean), "--report", ""]) == 2
    assert capsys.readouterr().err == "vitlab: data is empty: give a path\nvitlab: --report is empty: give a path\n"


def test_check_command_is_safe_with_hostile_names(clean, tmp_path, capsys):
    name = '<script>alert(1)<b>\n\x1b[31m\u202e&".png'
    shutil.copy(clean / "train/cat/0.png", clean / "val/cat" / name.replace("/", ""))
    (clean / "train" / "<i>\x1b]0;x\x07").mkdir()
    assert main(["check", str(clean), "--workers", "0", "--report", str(tmp_path / "page")]) == 3
    output, page = capsys.readouterr().out, (tmp_path / "page/index.html").read_text(encoding="utf-8")
    assert not set(output) & {"\x1b", "\x07", "\u202e"}
    assert '<script>alert(1)<b>\\n\\x1b[31m\\u202e&"' in output.replace("\n", "")
    assert not set(page) & {"\x1b", "\x07", "\u202e"}
    assert "<script" not in page
    assert "<i>" not in page
    assert "&lt;script&gt;alert(1)&lt;b&gt;\\n\\x1b[31m\\u202e&amp;" in page
    assert "http:" not in page
    assert "https:" not in page


@pytest.fixture(scope="module")
def planted(shared_data, tmp_path_factory):
    """A copy of trashnet's photographs with leaks in val; gives the root, and kind -> pairs of paths."""
    root = tmp_path_factory.mktemp("planted")
    with tarfile.open(shared_data("trashnet.tar")) as archive:
        archive.extractall(root, filter="data")
    (root,) = [folder.parent for folder in root.rglob("train") if folder.is_dir()]
    files = sorted((root / "train").rglob("*.jpg"))
    generator = np.random.default_rng(2)
    sources = iter([files[row] for row in generator.permutation(len(files))])
    pairs = {"exact": [], "resized": [], "changed": [], "relabelled": []}
    for kind, count in (("exact", 10), ("resized", 10), ("changed", 5), ("relabelled", 3)):
        for number in range(count):
            source = next(sources)
            label = source.parent.name
            if kind == "relabelled":
                label = "glass" if label != "glass" else "metal"
            target = root / "val" / label / f"planted-{kind}-{number}.jpg"
            with Image.open(source) as opened:
                image = opened.copy()
            if kind in ("exact", "relabelled"):
                shutil.copy(source, target)
            elif kind == "resized":
                share = generator.uniform(0.3, 0.9)
                size = round(image.width * share), round(image.height * share)
                image.resize(size).save(target, quality=int(generator.integers(40, 90)))
            elif number < 3:
                ImageOps.mirror(image).save(target, quality=80)
            else:
                image.crop((20, 30, 350, 480)).save(target, quality=80)
            pairs[kind].append({str(source), str(target)})
    return root, pairs


# Photographs of trashnet's own that show one scene twice, as a look at them confirms.
TWICE = ({"metal50", "metal120"}, {"paper123", "paper547"}, {"paper457", "paper553"})


def test_check_finds_leaks_planted_among_photographs_and_nothing_else(planted):
    root, pairs = planted
    report = check_data(root)
    groups = [{picture.path for picture in case.pictures} for finding in report.findings for case in finding.cases]
    for kind in ("exact", "resized", "changed", "relabelled"):
        missing = [pair for pair in pairs[kind] if not any(pair <= group for group in groups)]
        assert missing == [], kind
    conflicts = [{picture.path for picture in case.pictures} for case in report.find("exact_conflict")]
    assert sorted(map(sorted, conflicts)) == sorted(map(sorted, pairs["relabelled"]))
    known = [pair for kind in pairs for pair in pairs[kind]]
    for group in groups:
        rest = [pair for pair in known if pair <= group]
        sources = {path.rsplit("/", 1)[1].removesuffix(".jpg") for path in group if "planted-" not in path}
        assert len(group) == len(sources) + len(rest)
        assert len(sources) == 1 or sources in TWICE


def test_check_refuses_what_is_no_data_set(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        check_data(tmp_path / "nowhere")
    (tmp_path / "flat").mkdir()
    picture(0).save(tmp_path / "flat/0.png")
    with pytest.raises(InputError, match="holds 1 image but no class folders"):
        check_data(tmp_path / "flat")
