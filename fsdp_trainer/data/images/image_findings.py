"""What a model does not see of images, told with the findings about a data set."""

IMAGE_FINDINGS = {
    "images_transparent": (
        "{n} image{s} with transparent pixels, which show the colour that is stored beneath them",
        "lay them on a background, such as white, before",
    ),
    "images_scaled": (
        "{n} image{s} of more than 8 bits, made 8 bits: white is 65,535, of fractions 1.0",
        "save those with another white with 8 bits",
    ),
    "images_first_frame": (
        "{n} image{s} with several frames or pages, of which the first is read",
        "save each frame that the model should see as an image of its own",
    ),
    "images_not_turned": (
        "{n} image{s} with EXIF data that cannot be read, shown as stored",
        "save them again without EXIF data, turned as they should be",
    ),
}
"""The sentence and its advice, by the keys that `pictures.py` gives a picture."""
