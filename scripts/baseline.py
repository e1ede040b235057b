"""Score a classical classifier on thumbnails: the accuracy that a vision transformer has to beat on the same splits.

    python scripts/baseline.py --data digits
    python scripts/baseline.py --data photos --model knn --split test
    python scripts/baseline.py --data fashion-mnist --side 28 --channels 1 --model mlp --split test

Pixels of side x side thumbnails in RGB or grey, each standardised over the training images. Logistic regression takes
its C from five-fold cross-validation on the training images (on 5,000 of them where there are more); the others are as
scikit-learn ships them: 5 neighbours, and one hidden layer of 100 units trained for at most 200 epochs. The scored
split chooses nothing.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from vitlab.config import DataConfig
from vitlab.data.datasets import Split, load_dataset
from vitlab.data.preprocess import Preprocess
from vitlab.errors import InputError

REGULARISATIONS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
MAX_IMAGES_TO_CHOOSE_C = 5000


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line with the accuracy; give the exit code."""
    args = parse(arguments)
    start_s = time.perf_counter()
    try:
        dataset = load_dataset(args.data, val_fraction=args.val_fraction, seed=args.seed)
        if args.split not in dataset.splits:
            raise InputError(f"{args.data} has no split {args.split}: give --split {' or '.join(dataset.splits)}")
        train, scored = dataset.splits["train"], dataset.splits[args.split]
        train_features, scored_features = (thumbnails(split, args.side, args.channels) for split in (train, scored))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    classifier, description = fit(args.model, train_features, train.labels, seed=args.seed)
    correct = int((classifier.predict(scored_features) == scored.labels).sum())
    print(
        f"{description} on {args.side}x{args.side} thumbnails: {100 * correct / len(scored):.2f} % of {len(scored)} "
        f"{args.split} images right, trained on {len(train)}, {time.perf_counter() - start_s:.1f} s"
    )
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", default="digits", help="folder of images or built-in name (default: %(default)s)")
    parser.add_argument("--side", type=int, default=8, help="thumbnail side in pixels (default: %(default)s)")
    parser.add_argument("--channels", type=int, choices=(1, 3), default=3, help="1 for grey (default: %(default)s)")
    parser.add_argument("--model", choices=("logistic", "knn", "mlp"), default="logistic")
    parser.add_argument("--split", choices=("val", "test"), default="val", help="split to score (default: %(default)s)")
    parser.add_argument("--val_fraction", type=float, default=DataConfig.val_fraction, help="as data.val_fraction")
    parser.add_argument(
        "--seed", type=int, default=DataConfig.val_seed, help="as data.val_seed: it cuts the same splits"
    )
    args = parser.parse_args(arguments)
    if args.side < 1:
        parser.error(f"--side is {args.side}: give 1 or more pixels")
    if not 0 < args.val_fraction < 1:
        parser.error(f"--val_fraction is {args.val_fraction}: give a number between 0 and 1")
    return args


def thumbnails(split: Split, side: int, channels: int) -> npt.NDArray[np.float32]:
    """Read a split's images `(N,)` as rows of `side * side * channels` numbers in [0, 1]."""
    blank = (0.0,) * channels, (1.0,) * channels  # not applied here
    preprocess = Preprocess(
        image_size=(side, side), resize_mode="squash", channels=channels, mean=blank[0], std=blank[1]
    )
    rows = [preprocess.apply(split.read(i)).reshape(-1) for i in range(len(split))]
    return np.stack(rows).astype(np.float32) / np.float32(255)


def fit(name: str, features: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], *, seed: int) -> tuple[Any, str]:
    """Fit a classifier to features `(N, D)` and labels `(N,)`; give it with words for what it is."""
    if name == "knn":
        neighbours = make_pipeline(StandardScaler(), KNeighborsClassifier())
        return neighbours.fit(features, labels), "5 nearest neighbours"
    if name == "mlp":
        network = make_pipeline(StandardScaler(), MLPClassifier(random_state=seed))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # 200 epochs are what it gets
            return network.fit(features, labels), "multi-layer perceptron"
    strength = choose_regularisation(features, labels, seed=seed)
    return logistic_regression(strength).fit(features, labels), f"logistic regression (C {strength:g})"


def logistic_regression(strength: float) -> Any:
    """Give an unfitted pipeline of standardisation and logistic regression; `strength` is scikit-learn's C."""
    return make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=5000))


def choose_regularisation(features: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], *, seed: int) -> float:
    """Choose C by cross-validation; a class of fewer than five images lowers the number of folds."""
    if len(labels) > MAX_IMAGES_TO_CHOOSE_C:
        features, _, labels, _ = train_test_split(
            features, labels, train_size=MAX_IMAGES_TO_CHOOSE_C, stratify=labels, random_state=seed
        )
    folds = min(5, np.unique(labels, return_counts=True)[1].min())
    if folds < 2:
        return 1.0  # scikit-learn's default, where there is nothing to choose by
    grid = {"logisticregression__C": REGULARISATIONS}
    search = GridSearchCV(logistic_regression(1.0), grid, cv=folds, refit=False).fit(features, labels)
    return float(search.best_params_["logisticregression__C"])


if __name__ == "__main__":
    sys.exit(main())
