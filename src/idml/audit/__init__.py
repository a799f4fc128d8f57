"""Likely mislabelled, ambiguous and duplicate images of a data set, and a page to review them."""
