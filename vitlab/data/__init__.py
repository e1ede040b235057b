"""Images, data sets, preprocessing, augmentation and loading."""
