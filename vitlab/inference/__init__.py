"""Running a trained model on images."""
