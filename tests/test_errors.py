"""Messages about unknown names."""

import pytest

from idml.errors import find_similar, unknown_name


def test_the_nearest_name_is_suggested():
    message = unknown_name("loss", "triplet", ["proxy_nca", "triplet_semihard"])
    assert message == "unknown loss 'triplet'; did you mean 'triplet_semihard'? (one of proxy_nca, triplet_semihard)"


def test_capital_letters_do_not_matter():
    assert "did you mean 'CUB'?" in unknown_name("data set", "cub", ["glyphs", "CUB"])
    assert "did you mean 'cub'?" in unknown_name("data set", "CUB", ["glyphs", "cub"])


def test_a_long_list_of_names_is_described():
    message = unknown_name("trunk", "resnet", ["resnet50", "vit"], choices="any timm model")
    assert message == "unknown trunk 'resnet'; did you mean 'resnet50'? (any timm model)"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("triplet", ["triplet_semihard"]),  # its beginning counts more than soft_triple's spelling
        ("semihard", ["triplet_semihard"]),
        ("Multi-Similarity", ["multi_similarity"]),
        ("multi similarity", ["multi_similarity"]),
        ("proxy", ["proxy_nca", "proxy_anchor"]),
        ("proxy_nca_2", ["proxy_nca"]),
        ("softtriple", ["soft_triple"]),
        ("arcface", []),  # like none of them
        ("", []),
    ],
)
def test_what_may_have_been_meant(written, meant):
    known = ["soft_triple", "proxy_anchor", "proxy_nca", "multi_similarity", "triplet_semihard"]
    assert find_similar(written, known) == meant


def test_several_names_may_have_been_meant():
    message = unknown_name("loss", "proxy", ["proxy_nca", "proxy_anchor", "circle"], choices="few")
    assert message == "unknown loss 'proxy'; did you mean 'proxy_nca' or 'proxy_anchor'? (few)"


def test_no_known_names_give_no_suggestion():
    assert unknown_name("parameter", 3, [], whose=" of X") == "unknown parameter 3 of X (one of none)"
