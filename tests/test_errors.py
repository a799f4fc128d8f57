"""Messages about unknown names."""

from idml.errors import unknown_name


def test_the_nearest_name_is_suggested():
    message = unknown_name("loss", "triplet", ["proxy_nca", "triplet_semihard"])
    assert message == "unknown loss 'triplet'; did you mean 'triplet_semihard'? (one of proxy_nca, triplet_semihard)"


def test_capital_letters_do_not_matter():
    assert "did you mean 'CUB'?" in unknown_name("data set", "cub", ["glyphs", "CUB"])
    assert "did you mean 'cub'?" in unknown_name("data set", "CUB", ["glyphs", "cub"])


def test_a_long_list_of_names_is_described():
    message = unknown_name("trunk", "resnet", ["resnet50", "vit"], choices="any timm model")
    assert message == "unknown trunk 'resnet'; did you mean 'resnet50'? (any timm model)"


def test_no_known_names_give_no_suggestion():
    assert unknown_name("parameter", 3, [], whose=" of X") == "unknown parameter 3 of X (one of none)"
