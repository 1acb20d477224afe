"""Features of images: the spaces in which sets of images are compared."""
