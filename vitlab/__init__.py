"""Train, evaluate, run and watch vision transformers on your own image folders."""

__version__ = "0.1.0"
